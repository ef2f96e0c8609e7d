//! `corella pull`, `corella list` and `corella rm`: the hub's cache.

use std::io::{self, Write};

use corella_hub::{Hub, HubConfig, HubError, ModelName};

use crate::fetch_display::{FetchDisplay, shown_bytes};

/// Prints the path of each model once it is complete.
pub fn pull(config: HubConfig, models: &[ModelName]) -> Result<(), HubError> {
    let hub = Hub::new(config);
    for model in models {
        let display = FetchDisplay::new();
        let fetched = hub.fetch(model, &|event| display.handle(event));
        drop(display);
        let fetched = fetched?;
        let size = shown_bytes(fetched.num_bytes);
        match fetched.num_fetched {
            0 => eprintln!("{model}: {size}, up to date"),
            _ => eprintln!("{model}: {size}"),
        }
        print(&fetched.path.display().to_string());
    }
    Ok(())
}

pub fn list(config: HubConfig) -> Result<(), HubError> {
    let folder = config.cache.display().to_string();
    let models = Hub::new(config).list()?;
    if models.is_empty() {
        eprintln!("no models in {folder}; `corella pull OWNER/MODEL` fetches one");
        return Ok(());
    }
    let names: Vec<_> = models.iter().map(|model| model.name.to_string()).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0).max(5);
    print(&format!("{:width$}  {:>9}  commit", "model", "size"));
    for (model, name) in models.iter().zip(names) {
        let size = shown_bytes(model.num_bytes);
        let note = if model.is_complete {
            ""
        } else {
            "  incomplete"
        };
        let commit = &model.commit[..12];
        print(&format!("{name:width$}  {size:>9}  {commit}{note}"));
    }
    Ok(())
}

pub fn remove(config: HubConfig, models: &[ModelName]) -> Result<(), HubError> {
    let folder = config.cache.display().to_string();
    let hub = Hub::new(config);
    for model in models {
        let Some(removed) = hub.remove(model)? else {
            return Err(HubError::Name(format!(
                "{model} is not in {folder}; `corella list` says what is"
            )));
        };
        let size = shown_bytes(removed.num_bytes);
        eprintln!("{model}: deleted, {size} freed");
    }
    Ok(())
}

/// Writes a line. A reader that closes the pipe wants no more.
fn print(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}
