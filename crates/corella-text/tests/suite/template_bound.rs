//! Templates that would take all time, memory or stack end with an error.

use std::collections::BTreeMap;
use std::fs;

use corella_text::{ChatInput, ChatTemplate, RenderLimit, SpecialTokens, TextError};
use serde_json::json;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/hostile");

fn rendered(source: &str) -> Result<String, TextError> {
    let template = ChatTemplate::new(source, SpecialTokens::default())?;
    let limit = RenderLimit {
        max_bytes: 1 << 20,
        is_abandoned: &|| false,
    };
    let messages = [json!({"role": "user", "content": "Hi"})];
    let input = ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: None,
    };
    template.render_within(input, limit)
}

#[test]
fn hostile_templates_end_with_an_error() {
    let mut accepted = BTreeMap::new();
    for entry in fs::read_dir(FOLDER).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path
            .file_stem()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        let source = fs::read_to_string(&path).expect("a template");
        if let Ok(prompt) = rendered(&source) {
            accepted.insert(name, prompt.len());
        }
    }
    assert!(accepted.is_empty(), "{accepted:?}");
}

/// The engine and the rewriting of the source need stack or time for each of these.
#[test]
fn a_source_is_bounded() {
    for source in [
        format!("{{{{ {} }}}}", "a + ".repeat(100_000) + "a"),
        format!("{{{{ a{} }}}}", ".a".repeat(100_000)),
        format!("{{{{ a{} }}}}", " | list".repeat(100_000)),
        format!("{{{{ {}a{} }}}}", "(".repeat(100_000), ")".repeat(100_000)),
        format!("{{{{ {}a }}}}", "not ".repeat(100_000)),
        format!("{{{{ {}1 }}}}", "- ".repeat(100_000)),
        format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(80_000)),
        "{% if a %}".repeat(80_000),
        format!(
            "{}{}",
            "{% if a %}".repeat(40_000),
            "{% endif %}".repeat(40_000)
        ),
        "a".repeat((1 << 20) + 1),
    ] {
        let error = rendered(&source).expect_err(&source[..40]);
        assert!(
            matches!(error, TextError::TemplateSyntax(_)),
            "{}: {error}",
            &source[..40]
        );
    }
    // As many tokens as allowed.
    for source in [
        format!("{{{{ {} }}}}", "a + ".repeat(499) + "a"),
        format!("{{{{ a{} }}}}", ".a".repeat(499)),
        format!("{{{{ a{} }}}}", " | list".repeat(499)),
        format!("{{{{ {}1 }}}}", "not ".repeat(999)),
        format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(500)),
    ] {
        let _ = rendered(&source);
    }
}

/// Each of these is tried by itself: most hostile templates meet the bound of their steps first.
#[test]
fn values_are_bounded_in_depth() {
    let nested = |num_levels: usize| {
        format!(
            "{{% set ns = namespace(v=[]) %}}{{% for i in range({num_levels}) %}}{{% set ns.v = [ns.v] %}}{{% endfor %}}"
        )
    };
    rendered(&nested(200)).expect("it is not too deep");
    let error = rendered(&nested(300))
        .expect_err("it is too deep")
        .to_string();
    assert!(error.contains("levels deep"), "{error}");
    for source in [
        "{% set a = namespace() %}{% set b = namespace() %}{% set a.b = b %}",
        "{% set a = namespace() %}{% set a.a = a %}",
        "{% set a = namespace() %}{% for i in [1] %}{% set a.l = loop %}{% endfor %}",
        "{% set a = namespace() %}{% set b = [a] %}",
        "{% set a = namespace() %}{% set b = {'a': a} %}",
        "{% set a = namespace() %}{% set b = namespace(a=a) %}",
        "{% set a = namespace() %}{% set b = dict(a=a) %}",
        "{% set a = namespace() %}{% set b = cycler(a) %}",
    ] {
        let error = rendered(source).expect_err(source).to_string();
        assert!(
            error.contains("cannot be part of another value"),
            "{source}: {error}"
        );
    }
}

#[test]
fn a_width_is_bounded() {
    assert!(rendered("{{ '{:>1000}'.format(1) }}").is_ok());
    assert!(rendered("{{ '{:>1001}'.format(1) }}").is_err());
}

/// Some templates look at all messages again for each message.
#[test]
fn a_long_conversation_may_take_more_steps() {
    let source =
        "{% for m in messages %}{% for n in messages %}{{ n.role[:0] }}{% endfor %}{% endfor %}";
    let template = ChatTemplate::new(source, SpecialTokens::default()).expect("it parses");
    let messages = vec![json!({"role": "user", "content": "x".repeat(400)}); 400];
    let prompt = template.render(ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: None,
    });
    assert_eq!(prompt.expect("it is paid for"), "");
}
