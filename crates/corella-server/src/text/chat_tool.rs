//! Fits tools to a chat template. Clients leave out a description or parameters, but some templates fail without them.

use corella_text::ChatTemplate;
use serde_json::{Map, Value, json};

/// Adds the empty members without which the template does not take a tool.
pub fn fit_tools(tools: &mut Value, template: &ChatTemplate) {
    let support = template.tool_support();
    let functions = tools
        .as_array_mut()
        .into_iter()
        .flatten()
        .filter_map(|tool| tool.get_mut("function").and_then(Value::as_object_mut));
    for function in functions {
        if !support.without_description {
            add(function, "description", json!(""));
        }
        if !support.without_parameters {
            add(
                function,
                "parameters",
                json!({"type": "object", "properties": {}}),
            );
        }
        let Some(Value::Object(parameters)) = function.get_mut("parameters") else {
            continue;
        };
        if !support.without_properties {
            add(parameters, "properties", json!({}));
        }
        if !support.without_required {
            add(parameters, "required", json!([]));
        }
        if !support.without_parameter_description {
            let properties = parameters
                .get_mut("properties")
                .and_then(Value::as_object_mut);
            for (_, schema) in properties.into_iter().flatten() {
                if let Value::Object(schema) = schema {
                    add(schema, "description", json!(""));
                }
            }
        }
    }
}

/// Sets a member that is absent or `null`.
fn add(object: &mut Map<String, Value>, name: &str, value: Value) {
    let member = object.entry(name).or_insert(Value::Null);
    if member.is_null() {
        *member = value;
    }
}

#[cfg(test)]
mod tests {
    use corella_text::SpecialTokens;

    use super::*;

    /// Like gpt-oss's and Seed-OSS's templates.
    const STRICT: &str = "{% for tool in tools %}{% set f = tool.function %}{{ f.name }}{{ '// ' + f.description }}\
                          {% for name, spec in f.parameters.properties.items() %}{{ name + ': ' + spec.description }}{% endfor %}\
                          {% if f.parameters.required + [] %}{% endif %}{% endfor %}";
    const LENIENT: &str = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}";

    fn fitted(source: &str, function: Value) -> Value {
        let template = ChatTemplate::new(source, SpecialTokens::default()).unwrap();
        let mut tools = json!([{"type": "function", "function": function}]);
        fit_tools(&mut tools, &template);
        tools[0]["function"].take()
    }

    #[test]
    fn a_template_gets_the_members_that_it_reads() {
        let bare = json!({"name": "f"});
        let whole = json!({
            "name": "f", "description": "",
            "parameters": {"type": "object", "properties": {}, "required": []},
        });
        assert_eq!(fitted(STRICT, bare.clone()), whole);
        assert_eq!(fitted(LENIENT, bare.clone()), bare);
        let untyped = json!({"name": "f", "description": "", "parameters": {"type": "object"}});
        assert_eq!(fitted(STRICT, untyped.clone()), whole);
        assert_eq!(fitted(LENIENT, untyped.clone()), untyped);
        let typed = json!({"name": "f", "description": null, "parameters": {"properties": {"a": {"type": "string"}}}});
        let described = json!({
            "name": "f", "description": "",
            "parameters": {"properties": {"a": {"type": "string", "description": ""}}, "required": []},
        });
        assert_eq!(fitted(STRICT, typed.clone()), described);
        assert_eq!(fitted(LENIENT, typed.clone()), typed);
        // A template that prints no tools is given them as they are.
        assert_eq!(fitted("{{ messages }}", bare.clone()), bare);
    }
}
