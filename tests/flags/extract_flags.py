"""Lists flags and endpoints of other engines, from their own sources, for the tables in crates/corella/flags.

    pip download --no-deps vllm==0.33.0
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    git clone --bare https://github.com/ollama/ollama
    python3 tests/flags/extract_flags.py vllm-*.whl llama_cpp_python-*.tar.gz ollama.git

The files that define command lines and routes are read, and nothing is imported or run. The lists go to
crates/corella/flags/published.json. The tables beside it are written by hand, and a test compares them.
"""

import ast
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

OUT = Path(__file__).parents[2] / "crates/corella/flags/published.json"
VLLM = "0.33.0"
LLAMA_CPP_PYTHON = "0.3.36"
OLLAMA = "v0.32.15"


def main():
    wheel, sdist, ollama = map(Path, sys.argv[1:])
    for path, version in ((wheel, VLLM), (sdist, LLAMA_CPP_PYTHON)):
        assert version in str(path), f"{path} is not version {version}"
    with zipfile.ZipFile(wheel) as archive:
        vllm = vllm_flags(archive)
        vllm_paths = vllm_endpoints(archive)
    with tarfile.open(sdist) as archive:
        folder = f"llama_cpp_python-{LLAMA_CPP_PYTHON}/vendor/llama.cpp"
        source_of = lambda name: archive.extractfile(f"{folder}/{name}").read().decode()
        llama_server = llama_flags(source_of("common/arg.cpp"))
        llama_paths = llama_endpoints(source_of("tools/server/server.cpp"))
    verbs = ollama_verbs(committed(ollama, "cmd/cmd.go"))
    variables = ollama_variables(committed(ollama, "envconfig/config.go"))
    ollama_paths = ollama_endpoints(committed(ollama, "server/routes.go"))
    lists = {
        "vllm": {"version": VLLM, "flags": vllm, "endpoints": vllm_paths},
        "llama_server": {
            "version": f"that of llama-cpp-python {LLAMA_CPP_PYTHON}",
            "flags": llama_server,
            "endpoints": llama_paths,
        },
        "ollama": {
            "version": OLLAMA,
            "verbs": verbs,
            "variables": variables,
            "endpoints": ollama_paths,
        },
    }
    OUT.write_text(compact(lists) + "\n")
    print(f"{len(vllm)} flags of vllm serve, {len(llama_server)} of llama-server, {len(verbs)} verbs and")
    print(f"{len(variables)} variables of Ollama; {len(vllm_paths)}, {len(llama_paths)} and {len(ollama_paths)} endpoints")


def compact(lists):
    """JSON with a line for each flag, verb, variable and endpoint."""

    def of(value):
        if isinstance(value, dict) and "names" not in value:
            items = [f"{json.dumps(name)}: {of(item)}" for name, item in value.items()]
            return "{\n" + ",\n".join(items) + "\n}"
        if isinstance(value, list) and len(value) > 3:
            return "[\n" + ",\n".join(" " + json.dumps(item) for item in value) + "\n]"
        return json.dumps(value)

    return of(lists)


def committed(repository, path):
    command = ["git", "-C", repository, "show", f"{OLLAMA}:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def vllm_flags(archive):
    """The flags of `vllm serve`: calls of add_argument, and the fields of the frontend's classes."""
    engine = ast.parse(archive.read("vllm/engine/arg_utils.py"))
    frontend = ast.parse(archive.read("vllm/entrypoints/common/cli_args.py"))
    types = {}
    for name in archive.namelist():
        if name.startswith("vllm/config/") and name.endswith(".py"):
            types |= fields_of_classes(ast.parse(archive.read(name)))
    types |= fields_of_classes(frontend)
    flags = []
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        for field, annotation in types[name].items():
            flags.append(vllm_flag(["--" + field.replace("_", "-")], is_switch(annotation)))
    for tree in (frontend, engine):
        # A variable holds the keyword arguments of a group. It maps here to the class whose fields the arguments
        # describe.
        classes = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and is_call(node.value, "get_kwargs"):
                argument = node.value.args[0]
                classes[ast.unparse(node.targets[0])] = ast.unparse(argument)
        for node in ast.walk(tree):
            if not is_call(node, "add_argument"):
                continue
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if not names or not names[0].startswith("-"):
                continue
            flags.append(vllm_flag(names, takes_no_value(node, classes, types)))
    flags.sort(key=lambda flag: flag["names"])
    return flags


def vllm_flag(names, switch):
    long = [name for name in names if name.startswith("--")]
    return {
        "names": sorted(names, key=len, reverse=True),
        "negations": ["--no-" + name[2:] for name in long] if switch == "both" else [],
        "takes_value": not switch,
    }


def is_call(node, name):
    function = getattr(node, "func", None)
    return isinstance(node, ast.Call) and name in (
        getattr(function, "attr", None),
        getattr(function, "id", None),
    )


def fields_of_classes(tree):
    classes = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            classes[node.name] = {
                ast.unparse(item.target): ast.unparse(item.annotation) for item in fields
            }
    return classes


def is_switch(annotation):
    """vLLM makes --x and --no-x of a field whose type has `bool`, but not `str`, among its alternatives."""
    alternatives = [part.strip() for part in annotation.split("|")]
    return "both" if "bool" in alternatives and "str" not in alternatives else None


def takes_no_value(call, classes, types):
    for keyword in call.keywords:
        if keyword.arg == "action":
            action = ast.unparse(keyword.value)
            if "store_true" in action or "store_false" in action:
                return "one"
            if "BooleanOptionalAction" in action:
                return "both"
    described = re.search(r"(\w+kwargs)\['(\w+)'\]", ast.unparse(call))
    if described is None:
        return None
    variable, field = described.groups()
    return is_switch(types.get(classes.get(variable), {}).get(field, ""))


def llama_flags(source):
    """The flags of llama-server, from the calls that add options."""
    flags = {}
    for call in source.split("add_opt(common_arg(")[1:]:
        # An option without this call belongs to every program.
        programs = re.search(r"\.set_examples\(\{([^}]*)\}", call)
        if programs and not re.search(r"LLAMA_EXAMPLE_(SERVER|COMMON)\b", programs[1]):
            continue
        excluded = re.search(r"\.set_excludes\(\{([^}]*)\}", call)
        if excluded and "LLAMA_EXAMPLE_SERVER" in excluded[1]:
            continue
        # First the names that switch the option on, then any names that switch it off.
        groups = []
        rest = call
        while group := re.match(r"\s*\{([^}]*)\},", rest):
            groups.append(re.findall(r'"(-[^"]+)"', group[1]))
            rest = rest[group.end() :]
        handler = re.search(r"\]\s*\(\s*(common_params\b[^)]*)\)", rest)
        if not groups or handler is None:
            continue
        # The handler of a switch takes only the parameters, or also a bool for --x and --no-x.
        takes_value = "," in handler[1] and not re.search(r",\s*bool\b", handler[1])
        variable = re.search(r'\.set_env\("(\w+)"\)', call)
        names = sorted(groups[0], key=len, reverse=True)
        flags[names[0]] = {
            "names": names,
            "negations": sorted(sum(groups[1:], []), key=len, reverse=True),
            "takes_value": takes_value,
            "variable": variable[1] if variable else None,
        }
    return [flags[name] for name in sorted(flags)]


def ollama_verbs(source):
    """The commands of `ollama` that its help names, each with its other names."""
    verbs = []
    for match in re.finditer(r"&cobra\.Command\{(.*?)\n\t\}", source, re.DOTALL):
        use = re.search(r'Use:\s+"(\w[\w-]*)', match[1])[1]
        if use == "ollama" or re.search(r"Hidden:\s+true", match[1]):
            continue
        aliases = re.search(r"Aliases:.*", match[1])
        verbs.append([use] + re.findall(r'"(\w+)"', aliases[0] if aliases else ""))
    return sorted(verbs)


def ollama_variables(source):
    body = source.split("func AsMap()")[1]
    return sorted(set(re.findall(r'"(OLLAMA_\w+)":', body)))


def endpoint(method, path):
    """`GET /models/{name}`: the parameters of a path stand in braces, as in OpenAPI."""
    # In gin and cpp-httplib, a colon begins a parameter; in Starlette, a colon begins the parameter's type.
    path = re.sub(r"{(\w+):\w+}", r"{\1}", path)
    path = re.sub(r"/:(\w+)", r"/{\1}", path)
    return f"{method.upper()} {path}"


def vllm_endpoints(archive):
    """The routes of `vllm serve`, which are decorators, and the metrics, which are mounted."""
    found = {"GET /metrics"}
    for name in archive.namelist():
        # Launchers and commands have servers of their own.
        is_route = name.startswith("vllm/entrypoints/") and not re.search(r"/(launchers|cli)/", name)
        if not (is_route and name.endswith(".py")):
            continue
        for node in ast.walk(ast.parse(archive.read(name))):
            for call in getattr(node, "decorator_list", []):
                method = getattr(getattr(call, "func", None), "attr", None)
                if method not in ("get", "post", "put", "delete", "websocket") or not call.args:
                    continue
                if isinstance(call.args[0], ast.Constant):
                    found.add(endpoint(method, call.args[0].value))
    return sorted(found, key=by_path)


def llama_endpoints(source):
    routes = re.findall(r'ctx_http\.(get|post|del)\s*\("([^"]+)"', source)
    methods = {"get": "GET", "post": "POST", "del": "DELETE"}
    return sorted({endpoint(methods[method], path) for method, path in routes}, key=by_path)


def ollama_endpoints(source):
    routes = re.findall(r'\br\.(GET|POST|DELETE|HEAD|PUT)\("([^"]+)"', source)
    # A server that answers GET also answers HEAD.
    known = {endpoint(method, path) for method, path in routes}
    known -= {one for one in known if one.startswith("HEAD ") and one.replace("HEAD", "GET", 1) in known}
    return sorted(known, key=by_path)


def by_path(endpoint):
    method, path = endpoint.split()
    return path, method


main()
