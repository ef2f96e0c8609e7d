//! `corella ps` and `corella stop`: the models of a running server.

use std::time::{SystemTime, UNIX_EPOCH};

use tokio::runtime::Builder;

use crate::Error;
use crate::arguments::args::{PsArgs, ServerUrlArgs, StopArgs};
use crate::client::remote_server::{RemoteModel, RemoteModels};
use crate::error::display_bytes::display_bytes;
use crate::terminal::output::print_line;

pub fn ps(args: &PsArgs) -> Result<(), Error> {
    let models = ask(&args.server, async |server| server.list().await)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_s = now.map_or(0, |time| time.as_secs());
    for line in table(&models, now_s) {
        print_line(line);
    }
    Ok(())
}

pub fn stop(args: &StopArgs) -> Result<(), Error> {
    ask(&args.server, async |server| {
        for model in &args.models {
            server.stop(model).await?;
            eprintln!("{model}: unloaded when its requests have ended");
        }
        Ok(())
    })
}

fn ask<T>(
    args: &ServerUrlArgs,
    question: impl AsyncFnOnce(&RemoteModels) -> Result<T, String>,
) -> Result<T, Error> {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Error::Io("asking the server".to_owned(), error))?;
    let server = RemoteModels::new(&args.url, args.api_key.as_deref());
    let asked = server.and_then(|server| runtime.block_on(question(&server)));
    asked.map_err(Error::Config)
}

fn table(models: &[RemoteModel], now_s: u64) -> Vec<String> {
    let mut rows = vec![["NAME", "SIZE", "STATE", "UNTIL"].map(str::to_owned)];
    rows.extend(models.iter().map(|model| {
        [
            model.name.clone(),
            model.size.map_or_else(String::new, display_bytes),
            model.state.clone(),
            { model.expires_at.as_deref() }.map_or_else(String::new, |at| until(at, now_s)),
        ]
    }));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths = [0, 1, 2].map(|column| width(column).unwrap_or(0));
    let line = |[name, size, state, until]: &[String; 4]| {
        let [first, second, third] = widths;
        let line = format!("{name:first$}  {size:second$}  {state:third$}  {until}");
        line.trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Says when a model is unloaded. Servers write the year 9999 for models that stay.
fn until(expires_at: &str, now_s: u64) -> String {
    const YEAR_S: u64 = 366 * 24 * 3600;
    let Some(at_s) = unix_s(expires_at) else {
        return expires_at.to_owned();
    };
    match at_s.saturating_sub(now_s) {
        0 => "now".to_owned(),
        left_s @ 1..120 => format!("{left_s} s"),
        left_s @ 120..7200 => format!("{} min", left_s / 60),
        left_s @ 7200..YEAR_S => format!("{} h", left_s / 3600),
        _ => "for ever".to_owned(),
    }
}

/// Reads a time as servers of Ollama's API write it: `2026-01-31T12:00:00.5Z`, or with an offset such as `+02:00`.
fn unix_s(text: &str) -> Option<u64> {
    let (date, rest) = text.split_once('T')?;
    let zone_at = rest.find(['Z', '+', '-'])?;
    let (time, zone) = rest.split_at(zone_at);
    let number = |text: &str| text.parse::<i64>().ok();
    let [year, month, day] = parts(date, '-')?.map(number);
    let [hour, minute, second] = parts(time.split('.').next()?, ':')?.map(number);
    let offset_min = match zone.split_at(1) {
        ("Z", _) => 0,
        (sign, offset) => {
            let (hours, minutes) = offset.split_once(':')?;
            let minutes = 60 * number(hours)? + number(minutes)?;
            if sign == "-" { -minutes } else { minutes }
        }
    };
    // Years begin in March, so that the leap day is the last of its year.
    let (year, month) = (year? - i64::from(month? < 3), (month? + 9) % 12);
    let leap_days = year / 4 - year / 100 + year / 400;
    let days = 365 * year + leap_days + (153 * month + 2) / 5 + day? - 1 - DAYS_TO_1970;
    let minutes = 60 * (24 * days + hour?) + minute? - offset_min;
    u64::try_from(60 * minutes + second?).ok()
}

/// The days from March of the year 0 to January 1970.
const DAYS_TO_1970: i64 = 719_468;

fn parts(text: &str, separator: char) -> Option<[&str; 3]> {
    text.split(separator).collect::<Vec<_>>().try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_in_any_zone() {
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", Some(0)),
            ("2000-03-01T00:00:00.123456Z", Some(951_868_800)),
            ("2024-02-29T23:59:59Z", Some(1_709_251_199)),
            ("2024-03-01T01:59:59+02:00", Some(1_709_251_199)),
            ("2024-02-29T18:29:59.5-05:30", Some(1_709_251_199)),
            ("9999-12-31T23:59:59Z", Some(253_402_300_799)),
            ("tomorrow", None),
            ("2024-02-29T23:59Z", None),
        ] {
            assert_eq!(unix_s(text), seconds, "{text}");
        }
    }

    #[test]
    fn a_table_has_a_row_for_each_model() {
        let model = |name: &str, size, state: &str, expires_at: Option<&str>| RemoteModel {
            name: name.to_owned(),
            size,
            state: state.to_owned(),
            expires_at: expires_at.map(str::to_owned),
        };
        let models = [
            model("fox", Some(3 << 30), "loaded", Some("1970-01-01T00:05:07Z")),
            model(
                "embedder",
                Some(5 << 20),
                "loaded",
                Some("9999-12-31T23:59:59Z"),
            ),
            model("owl", None, "failed", None),
        ];
        let expected = [
            "NAME      SIZE     STATE   UNTIL",
            "fox       3.0 GiB  loaded  5 min",
            "embedder  5.0 MiB  loaded  for ever",
            "owl                failed",
        ];
        assert_eq!(table(&models, 7), expected);
        assert_eq!(table(&[], 0), ["NAME  SIZE  STATE  UNTIL"]);
        for (left, shown) in [
            ("00:00:05", "now"),
            ("00:01:00", "53 s"),
            ("10:00:07", "10 h"),
        ] {
            assert_eq!(until(&format!("1970-01-01T{left}Z"), 7), shown);
        }
    }
}
