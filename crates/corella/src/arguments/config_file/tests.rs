//! Tests of the configuration file.

use clap::CommandFactory;

use super::*;
use crate::arguments::args::Cli;

struct TestFile(PathBuf);

impl TestFile {
    fn new(name: &str, text: &str) -> Self {
        let name = format!("corella-config-{}-{name}.toml", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn program() -> Command {
    Cli::command()
}

fn expand_file(name: &str, text: &str, typed: &str) -> Result<Arguments, String> {
    let file = TestFile::new(name, text);
    let words = typed.split(' ').map(OsString::from);
    let path = OsString::from(format!("--config={}", file.0.display()));
    expand(&program(), words.chain([path]).collect(), [])
}

/// Returns the words between the command and its typed arguments.
fn added(name: &str, text: &str, typed: &str) -> Vec<String> {
    let arguments = expand_file(name, text, typed).unwrap();
    let num_typed = typed.split(' ').count() - 2 + 1;
    let words = &arguments.words[2..arguments.words.len() - num_typed];
    words
        .iter()
        .map(|word| word.to_string_lossy().into_owned())
        .collect()
}

#[test]
fn every_kind_of_option_has_its_value() {
    let text = "
        model = \"models/x\"
        port = 8_080
        pin_threads = true
        allow-unknown-fields = false
        enable-prefix-caching = false
        kv-cache-memory = \"1G\"
        max-pinned-share = 0.5
        served-model-name = [\"a\", \"b\"]
        chunked-prefill-size = -1
        page-size = 0x20 # another name of --block-size
    ";
    let mut words = added("kinds", text, "corella serve");
    words.sort();
    let mut expected = [
        "--model=models/x",
        "--port=8080",
        "--pin-threads",
        "--no-enable-prefix-caching",
        "--kv-cache-memory=1G",
        "--max-pinned-share=0.5",
        "--served-model-name=a",
        "--served-model-name=b",
        "--chunked-prefill-size=-1",
        "--block-size=32",
    ];
    expected.sort();
    assert_eq!(words, expected);
}

#[test]
fn what_is_typed_wins() {
    let text = "port = 1\nmodel = \"x\"\nserved-model-name = [\"a\"]\nthreads = 2";
    let typed = "corella serve other-model --port=2 --served-model-name b";
    assert_eq!(added("typed", text, typed), ["--threads=2"]);
    // A typed prompt excludes other kinds of prompt.
    let text = "prompt-tokens = 5\nmax-tokens = 3";
    let typed = "corella generate -p hello";
    assert_eq!(added("excluded", text, typed), ["--max-tokens=3"]);
}

#[test]
fn commands_share_a_file() {
    let text = "port = 1\nthreads = 2\n[generate]\nthreads = 1\n[serve]\nport = 3";
    assert_eq!(
        added("generate", text, "corella generate -p x"),
        ["--threads=1"]
    );
    let mut words = added("serve", text, "corella serve");
    words.sort();
    assert_eq!(words, ["--port=3", "--threads=2"]);
}

#[test]
fn mistakes_are_found_in_their_line() {
    for (text, line, reason) in [
        (
            "port = 1\nprot = 2",
            2,
            "has no option `prot`; did you mean `port`?",
        ),
        ("max_num_seq = 2", 1, "did you mean `max-num-seqs`?"),
        ("\n\nwarp-drive = true", 3, "has no option `warp-drive`"),
        ("[serve]\nprompt = \"x\"", 2, "has no option `prompt`"),
        (
            "[sreve]\nport = 1",
            1,
            "there is no table [sreve]; there are [serve]",
        ),
        ("port = 1\nport = 2", 2, "duplicate key"),
        ("port = 1\nhost = ", 2, ""),
        ("pin-threads = 3", 1, "`pin-threads` must be true or false"),
        ("port = [1, 2]", 1, "`port` takes one value"),
        ("port = true", 1, "`port` takes a text or a number"),
        ("config = \"other.toml\"", 1, "has no option `config`"),
        (
            "block-size = 16\npage-size = 16",
            2,
            "the same option as `block-size`",
        ),
        (
            "port = 1\nmiddleware = \"x\"",
            2,
            "there is no option --middleware: code of others is not loaded",
        ),
        (
            "tensor-parallel-size = 2",
            1,
            "--tensor-parallel-size 2: matrices are not split",
        ),
        (
            "max-model-len = 5\n\nctx-size = 6",
            3,
            "`ctx-size` is the same option as `max-model-len` in line 1",
        ),
        (
            "[speculative-config]\nmethod = \"eagle\"",
            1,
            "the method eagle is not there",
        ),
    ] {
        let error = expand_file("mistake", text, "corella serve").unwrap_err();
        let place = format!("mistake.toml, line {line}: ");
        assert!(
            error.contains(&place) && error.contains(reason),
            "{text}: {error}"
        );
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

/// Flags of other servers mean the same as on the command line.
#[test]
fn flags_of_other_servers_are_keys_too() {
    let text = "
        trust-remote-code = true
        enforce_eager = false
        ctx-size = 4096
        gpu-layers = 99
        allowed-origins = [\"https://a\", \"https://b\"]
        enable-chunked-prefill = false
        tensor-parallel-size = 1
        cudagraph-capture-sizes = [1, 2]
        speculative-config = { method = \"ngram\", num_speculative_tokens = 4 }
        [serve]
        parallel = 3
    ";
    let arguments = expand_file("foreign", text, "corella serve x --port=1").unwrap();
    let mut words = arguments.words.clone();
    words.truncate(words.len() - 3);
    words.sort();
    let mut expected = [
        "corella",
        "serve",
        "--max-model-len=4096",
        "--cors-allow-origin=https://a",
        "--cors-allow-origin=https://b",
        "--no-chunked-prefill",
        "--speculate=ngram",
        "--draft-tokens=4",
        "--max-num-seqs=3",
    ];
    expected.sort();
    assert_eq!(words, expected);
    let warnings = arguments.warnings.join("\n");
    for warning in [
        "foreign.toml, line 2: --trust-remote-code has no effect: ",
        "foreign.toml, line 4: --ctx-size is --max-model-len",
        "foreign.toml, line 5: --gpu-layers has no effect: ",
        "foreign.toml, line 12: --parallel is --max-num-seqs",
    ] {
        assert!(warnings.contains(warning), "{warnings}");
    }
    // The command line wins here, too.
    let typed = "corella serve --max-model-len 8192";
    assert_eq!(added("typed-foreign", "ctx-size = 4096", typed), [""; 0]);
}

#[test]
fn a_wrong_value_is_refused_with_its_line() {
    let arguments = expand_file("value", "seed = 1\nport = 70000", "corella serve").unwrap();
    let error = program()
        .try_get_matches_from(&arguments.words)
        .unwrap_err();
    let message = arguments.explain(&error).unwrap();
    assert!(
        message.contains("value.toml, line 2: invalid value '70000'"),
        "{message}"
    );
    let message = arguments.locate("--seed must be even".to_owned());
    assert!(
        message.contains("value.toml, line 1: --seed must"),
        "{message}"
    );
    assert_eq!(arguments.locate("--seeds".to_owned()), "--seeds");
}

#[test]
fn without_a_file_nothing_changes() {
    let words: Vec<OsString> = ["corella", "serve", "--port", "1"]
        .map(OsString::from)
        .into();
    let unchanged = expand(&program(), words.clone(), []).unwrap();
    assert_eq!(unchanged.words, words);
}

/// Returns the words that variables add to a command.
fn from_environment(variables: &[(&str, &str)], typed: &str) -> Result<Arguments, String> {
    let words = typed.split(' ').map(OsString::from);
    let pairs = variables
        .iter()
        .map(|(name, value)| ((*name).into(), (*value).into()));
    expand(&program(), words.collect(), pairs)
}

#[test]
fn every_option_has_a_variable() {
    let variables = [
        ("CORELLA_PORT", "9001"),
        ("CORELLA_MODEL", "models/x"),
        ("CORELLA_SERVED_MODEL_NAME", "a, b"),
        ("CORELLA_PIN_PREFIX", "one, two"),
        ("CORELLA_KV_DISK", "/kv,1G"),
        ("CORELLA_PIN_THREADS", "1"),
        ("CORELLA_SLO_ADMISSION", "false"),
        ("CORELLA_HOST", ""),
        ("CORELLA_NO_SUCH_OPTION", "1"),
        ("OTHER_SEED", "1"),
    ];
    let arguments = from_environment(&variables, "corella serve --threads 2").unwrap();
    let mut words: Vec<_> = arguments.words[2..].to_vec();
    words.sort();
    let mut expected = [
        "--port=9001",
        "--model=models/x",
        "--served-model-name=a",
        "--served-model-name=b",
        "--pin-prefix=one, two",
        "--kv-disk=/kv,1G",
        "--pin-threads",
        "--threads",
        "2",
    ];
    expected.sort();
    assert_eq!(words, expected);
}

#[test]
fn what_is_typed_comes_before_variables_and_these_before_the_file() {
    let variables = [
        ("CORELLA_PORT", "2"),
        ("CORELLA_MODEL", "y"),
        ("CORELLA_SEED", "5"),
    ];
    let arguments = from_environment(&variables, "corella serve x --port 1").unwrap();
    assert_eq!(arguments.words[2..], ["--seed=5", "x", "--port", "1"]);

    let file = TestFile::new("behind", "port = 3\nseed = 3\nthreads = 3");
    let path = file.0.display().to_string();
    let variables = [("CORELLA_CONFIG", &*path), ("CORELLA_PORT", "2")];
    let arguments = from_environment(&variables, "corella serve --seed 1").unwrap();
    let words = &arguments.words[2..];
    assert_eq!(words, ["--port=2", "--threads=3", "--seed", "1"]);
}

#[test]
fn a_mistyped_variable_is_told_with_the_nearest_name() {
    let variables = [
        ("CORELLA_MAX_NUM_SEQ", "4"),
        ("CORELLA_PORTT", "9001"),
        // Variables of other commands, of tests and of scripts.
        ("CORELLA_NO_HISTORY", "1"),
        ("CORELLA_NIXL_LIBRARY", "lib.so"),
        ("CORELLA_TEST_ISA", "portable"),
        ("CORELLA_BIN", "corella"),
        ("CORELLA_EMULATED_TILES", "1"),
        ("CORELLA_FUZZ_SECONDS", "1"),
        ("CORELLA_IMAGE", "registry/corella"),
        ("CORELLA_VERSION", "1"),
        ("CORELLA_API_KEY", "secret"),
        ("CORELLA_SERVICE_PORT_HTTP", "8000"),
        ("CORELLA_DECODE_SERVICE_PORT", "8000"),
        ("CORELLA_PORT_8000_TCP_PORT", "8000"),
    ];
    let arguments = from_environment(&variables, "corella serve").unwrap();
    assert_eq!(arguments.words, ["corella", "serve"]);
    let warnings = [
        "CORELLA_MAX_NUM_SEQ is not read; did you mean CORELLA_MAX_NUM_SEQS?",
        "CORELLA_PORTT is not read; did you mean CORELLA_PORT?",
    ];
    assert_eq!(arguments.warnings, warnings);
}

/// Kubernetes describes a service by such variables.
#[test]
fn the_address_of_a_service_is_no_port() {
    let variables = [
        ("CORELLA_PORT", "tcp://10.0.171.239:8000"),
        ("CORELLA_SERVICE_HOST", "10.0.171.239"),
        ("CORELLA_PORT_8000_TCP", "tcp://10.0.171.239:8000"),
    ];
    let arguments = from_environment(&variables, "corella serve").unwrap();
    assert_eq!(arguments.words, ["corella", "serve"]);
}

#[test]
fn a_wrong_value_is_refused_with_its_variable() {
    let arguments = from_environment(&[("CORELLA_PORT", "70000")], "corella serve").unwrap();
    let error = program()
        .try_get_matches_from(&arguments.words)
        .unwrap_err();
    let message = arguments.explain(&error).unwrap();
    assert!(
        message.contains("CORELLA_PORT: invalid value '70000'"),
        "{message}"
    );
    let error = from_environment(&[("CORELLA_PIN_THREADS", "maybe")], "corella serve");
    let error = error.unwrap_err();
    assert!(
        error.contains("CORELLA_PIN_THREADS must be true or false"),
        "{error}"
    );
}
