//! Tests of the models file.

use clap::CommandFactory;

use super::*;

/// Reads a file for `corella serve` with these words.
fn read_text(name: &str, text: &str, words: &str) -> Result<Vec<ListedModel>, String> {
    let name = format!("corella-models-{}-{name}.toml", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, text).unwrap();
    let words = format!("corella serve {words}");
    let words: Vec<_> = words.split_whitespace().map(OsString::from).collect();
    let models = read(&Cli::command(), &words, &path, &mut Vec::new());
    std::fs::remove_file(&path).unwrap();
    models.map_err(|told| told.replace(&path.display().to_string(), "FILE"))
}

#[test]
fn a_table_replaces_options_of_the_command_line() {
    let text = "
        [models.owl]
        model = \"models/x\"
        max_model_len = 4096
        served-model-name = [\"night\", \"owl\"]
        keep_alive = \"1h\"
        [models.\"some/fox\"]
        pinned = true
        hf-repo = \"owner/fox:Q8_0\"
        ctx-size = 2048
        enable-prefix-caching = false
    ";
    let models = read_text(
        "options",
        text,
        "--threads 3 --max-model-len 512 --port 1 -- some",
    )
    .unwrap();
    let [owl, fox] = &*models else {
        panic!("there are two models");
    };
    assert_eq!((&*owl.name, owl.is_pinned), ("owl", false));
    assert_eq!((&*fox.name, fox.is_pinned), ("some/fox", true));
    assert!(owl.place.ends_with(".toml, line 2"), "{}", owl.place);
    assert!(
        owl.model_place.ends_with(".toml, line 3"),
        "{}",
        owl.model_place
    );
    assert_eq!(owl.args.request.served_model_name, ["owl", "night"]);
    assert_eq!(fox.args.request.served_model_name, ["some/fox"]);
    assert_eq!(owl.args.model.model, Some("models/x".into()));
    assert_eq!(fox.args.model.model, Some("owner/fox:Q8_0".into()));
    let lens = [owl, fox].map(|model| model.args.model.max_model_len.and_then(|len| len.0));
    assert_eq!(lens, [Some(4096), Some(2048)]);
    let caching = [owl, fox].map(|model| !model.args.engine.cache.no_enable_prefix_caching);
    assert_eq!(caching, [true, false]);
    let is_given = [owl, fox].map(|model| model.args.models.keep_alive.is_some());
    assert_eq!(is_given, [true, false]);
    for model in [owl, fox] {
        assert_eq!(model.args.engine.device.threads, Some(3));
    }
}

#[test]
fn mistakes_are_told_with_their_line_and_key() {
    let table = |lines: &str| format!("[models.fox]\nmodel = \"x\"\n{lines}");
    for (text, told) in [
        (
            table("pined = true"),
            "FILE, line 3: a model has no option `pined`; did you mean `pinned`?",
        ),
        (
            table("max-model-length = 3"),
            "FILE, line 3: a model has no option `max-model-length`; did you mean `max-model-len`?",
        ),
        (
            table("port = 80"),
            "FILE, line 3: `port` is an option of the server, not of a model: it stays on the command line",
        ),
        (
            table("api_keys = \"k\""),
            "FILE, line 3: `api_keys` is an option of the server",
        ),
        (
            table("model-memory = \"1G\""),
            "FILE, line 3: `model-memory` is an option of the server",
        ),
        (
            table("ssl-cert-file = \"c\""),
            "FILE, line 3: `ssl-cert-file` is an option of the server",
        ),
        (
            table("allow-unknown-fields = true"),
            "FILE, line 3: `allow-unknown-fields` is an option",
        ),
        (
            table("pinned = 1"),
            "FILE, line 3: `pinned` must be true or false",
        ),
        (
            table("hf-repo = \"owner/fox\""),
            "FILE, line 3: `hf-repo` is the same option as `model` in line 2",
        ),
        (
            "[models]\nfox = { model = \"x\", hf-repo = \"owner/fox\" }".to_owned(),
            "FILE, line 2: `",
        ),
        (
            table("enable-lora = true"),
            "FILE, line 3: `enable-lora` is for a server whose model stays loaded",
        ),
        (
            table("max-loras = 2"),
            "FILE, line 3: `max-loras` is for a server whose model stays loaded",
        ),
        (
            table("kv-disk-salted = false"),
            "FILE, line 3: `kv-disk-salted` is switched on by the command line",
        ),
        (
            table("dtype = \"fp7\""),
            "FILE, line 3: invalid value 'fp7' for '--dtype",
        ),
        (
            table("max-num-seqs = [1]"),
            "FILE, line 3: `max-num-seqs` takes one value",
        ),
        (
            table("pinned = true\npinned = true"),
            "FILE, line 4: duplicate key",
        ),
        (table("[models.fox]"), "FILE, line 3: "),
        (
            table("[fox]"),
            "FILE, line 3: there is no table [fox]; that of a model is [models.fox]",
        ),
        (
            "port = 3".to_owned(),
            "FILE, line 1: `port` is in no model's table",
        ),
        (
            "[models]\nfox = 3".to_owned(),
            "FILE, line 2: [models.fox] must be a table",
        ),
        (
            "[models.fox]\nmodel = true".to_owned(),
            "FILE, line 2: `model`",
        ),
        (
            "[models.fox]".to_owned(),
            "FILE, line 1: [models.fox] has no `model`",
        ),
        ("[models]".to_owned(), "FILE: it has no table [models.NAME]"),
        ("models = ".to_owned(), "FILE, line 1: "),
    ] {
        let words = "--kv-disk /nowhere --kv-disk-salted";
        let found = read_text("mistake", &text, words).err();
        let found = found.unwrap_or_else(|| panic!("it is taken: {text}"));
        assert!(found.starts_with(told), "{text}: {found}");
    }
    let none = read(
        &Cli::command(),
        &[],
        Path::new("no-such-file"),
        &mut Vec::new(),
    )
    .err();
    let none = none.expect("there is no such file");
    assert!(
        none.starts_with("--models cannot read no-such-file"),
        "{none}"
    );
}
