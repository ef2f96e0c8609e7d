//! The nearest route to an unknown path or method. The routes come from the OpenAPI document.

use std::sync::OnceLock;

use crate::wire::field_check::closest;
use crate::wire::openapi::routes;

/// A path and its methods. `{…}` stands for one step, and `{model}` at the end for the rest of the path.
#[derive(Debug)]
pub struct Route {
    pub path: String,
    pub methods: Vec<String>,
}

fn all_routes() -> &'static [Route] {
    static ROUTES: OnceLock<Vec<Route>> = OnceLock::new();
    ROUTES.get_or_init(routes)
}

/// Returns the methods of a path.
pub fn methods(path: &str) -> Vec<&'static str> {
    let routes = all_routes().iter().filter(|route| route.matches(path));
    let methods = routes.flat_map(|route| &route.methods);
    methods.map(String::as_str).collect()
}

/// Endpoints that change Ollama's models.
const OF_A_LIBRARY: [&str; 5] = [
    "/api/create",
    "/api/copy",
    "/api/push",
    "/api/delete",
    "/api/blobs",
];

/// Returns a sentence that names the nearest route, or the list of all routes.
pub fn advice(method: &str, path: &str) -> String {
    let is_of_a_library = OF_A_LIBRARY.iter().any(|known| {
        path.strip_prefix(known)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    });
    if is_of_a_library {
        return "The models of this server are named when it starts and stay as they are; `corella pull`, \
                `corella rm` and `corella quantize` change what is on the disk."
            .to_owned();
    }
    match nearest(method, path) {
        Some((method, path)) => format!("Did you mean {method} {path}?"),
        None => "GET /openapi.json lists the paths.".to_owned(),
    }
}

/// Limits the steps at the end of a path that are compared with routes.
const MAX_STEPS: usize = 8;

fn nearest(method: &str, path: &str) -> Option<(String, String)> {
    let steps: Vec<&str> = path.split('/').filter(|step| !step.is_empty()).collect();
    let from_end = |num_steps: usize| {
        let end = steps.len().checked_sub(num_steps)?;
        let path = format!("/{}", steps[end..].join("/"));
        let route = best(method, |route| route.matches(&path))?;
        Some((route.method(method), path))
    };
    // The base URL may have too much before the path, end in `/v1` twice, or lack `/v1`.
    let longest = steps.len().min(MAX_STEPS);
    let as_written = (2..=longest).rev().find_map(from_end);
    let with_version = || {
        let path = format!("/v1/{}", steps.join("/"));
        let route = best(method, |route| route.matches(&path))?;
        Some((route.method(method), path))
    };
    let misspelt = || {
        let path = format!("/{}", steps.join("/"));
        let names = all_routes().iter().map(|route| &*route.path);
        let name = closest(
            &path,
            names.filter(|name| !name.contains('{') && *name != "/"),
        )?;
        let route = best(method, |route| route.path == name)?;
        Some((route.method(method), route.path.clone()))
    };
    // A match of only the last step is less certain than a path with a typing error.
    as_written
        .or_else(with_version)
        .or_else(misspelt)
        .or_else(|| from_end(1).filter(|_| longest > 0))
}

/// Returns the first matching route, preferably one with this method.
fn best(method: &str, fits: impl Fn(&Route) -> bool) -> Option<&'static Route> {
    let fitting: Vec<_> = all_routes().iter().filter(|route| fits(route)).collect();
    let same = fitting.iter().find(|route| route.answers(method));
    same.or(fitting.first()).copied()
}

impl Route {
    fn answers(&self, method: &str) -> bool {
        self.methods.iter().any(|known| known == method)
    }

    /// Returns the caller's method if the route has it, else the route's first method.
    fn method(&self, method: &str) -> String {
        match (self.answers(method), self.methods.first()) {
            (false, Some(own)) => own.clone(),
            _ => method.to_owned(),
        }
    }

    fn matches(&self, path: &str) -> bool {
        let mut steps = path.split('/');
        let mut known = self.path.split('/').peekable();
        while let Some(name) = known.next() {
            let Some(step) = steps.next() else {
                return false;
            };
            // Names of models have slashes.
            if name == "{model}" && known.peek().is_none() {
                return !step.is_empty();
            }
            let fits = match name.starts_with('{') {
                true => !step.is_empty(),
                false => name == step,
            };
            if !fits {
                return false;
            }
        }
        steps.next().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_mistakes_are_understood() {
        for (method, path, meant) in [
            (
                "POST",
                "/v1/v1/chat/completions",
                "POST /v1/chat/completions",
            ),
            ("POST", "/v1/chat/completions/", "POST /v1/chat/completions"),
            ("POST", "/openai/v1/embeddings", "POST /v1/embeddings"),
            ("POST", "/messages", "POST /v1/messages"),
            ("GET", "/v1/modles", "GET /v1/models"),
            ("POST", "/v1/chat/completion", "POST /v1/chat/completions"),
            ("GET", "/api/tag", "GET /api/tags"),
            ("GET", "/v1/v1/models/org/mock", "GET /v1/models/org/mock"),
            ("GET", "/healthz", "GET /health"),
            // The route's method, if the caller's differs.
            ("GET", "/v1/complete", "POST /v1/completions"),
        ] {
            let advice = advice(method, path);
            assert_eq!(advice, format!("Did you mean {meant}?"), "{method} {path}");
        }
    }

    #[test]
    fn a_path_that_is_like_no_other_leads_to_the_list() {
        for path in ["/wp-login.php", "/", "", "/v3", &"/x".repeat(500)] {
            let advice = advice("GET", path);
            assert_eq!(advice, "GET /openapi.json lists the paths.", "{path}");
        }
    }

    #[test]
    fn methods_are_those_of_the_path() {
        assert_eq!(methods("/v1/chat/completions"), ["POST"]);
        let mut methods = methods("/v1/responses/resp-1");
        methods.sort_unstable();
        assert_eq!(methods, ["DELETE", "GET"]);
    }
}
