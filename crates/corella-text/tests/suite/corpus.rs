//! Templates with the constructs of published ones print the same as Jinja2, for conversations of every shape, and fail
//! where Jinja2 fails.

use std::collections::BTreeMap;

use corella_text::{ChatInput, ChatTemplate, SpecialTokens};
use serde_json::Value;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");

fn fnv1a(text: &str) -> String {
    let hash = text.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
    });
    format!("{hash:016x}")
}

#[test]
fn every_template_prints_every_conversation_as_jinja2_does() {
    let read =
        |name: &str| std::fs::read_to_string(format!("{FOLDER}/{name}")).expect("it is there");
    let corpus: Value = serde_json::from_str(&read("corpus.json")).expect("JSON");
    let conversations = corpus["conversations"].as_array().expect("an array");
    assert_eq!(conversations.len(), 200);
    let templates = corpus["templates"].as_object().expect("an object");
    let mut wrong = BTreeMap::<&str, Vec<String>>::new();
    for (name, expected) in templates {
        let special = SpecialTokens {
            bos_token: Some("<s>".into()),
            eos_token: Some("</s>".into()),
            ..SpecialTokens::default()
        };
        let source = read(&format!("corpus/{name}.jinja"));
        let template =
            ChatTemplate::new(&source, special).unwrap_or_else(|error| panic!("{name}: {error}"));
        let hashes = expected["hashes"].as_str().expect("text").split(' ');
        assert_eq!(hashes.clone().count(), conversations.len());
        for (seed, (asked, hash)) in conversations.iter().zip(hashes).enumerate() {
            let rendered = template.render(ChatInput {
                messages: asked["messages"].as_array().expect("messages"),
                tools: Some(&asked["tools"]).filter(|tools| !tools.is_null()),
                add_generation_prompt: asked["add_generation_prompt"] == true,
                continue_final_message: false,
                kwargs: asked["kwargs"].as_object(),
            });
            let found = rendered.as_deref().map_or("-".to_owned(), fnv1a);
            if found != hash {
                let whole = &expected["whole"][seed.to_string()];
                let what = format!("conversation {seed}: {rendered:#?}, and not {whole:#}");
                wrong.entry(name).or_default().push(what);
            }
        }
    }
    let report: Vec<_> = wrong
        .iter()
        .map(|(name, wrong)| format!("{name}: {} differences\n{}", wrong.len(), wrong[0]))
        .collect();
    assert!(
        report.is_empty(),
        "{}\ncompare_templates.py shows the places",
        report.join("\n")
    );
}
