"""Makes fields.json: the names of the fields that other servers and their clients define.

    python3 -m venv .venv && .venv/bin/pip install -r tests/fields/requirements.txt
    .venv/bin/pip download --no-deps -d target/fields vllm==0.33.0
    .venv/bin/pip download --no-deps --no-binary llama-cpp-python -d target/fields llama-cpp-python==0.3.36
    .venv/bin/python tests/fields/make_fields.py target/fields

The file has names only. Names of OpenAI, Anthropic and Ollama come from the types of their Python packages: parameters
of requests, and the models of answers, since clients send answers back. Names of vLLM come from its wheel, and names of
llama.cpp from the copy of its server in a package. `cargo test -p corella-server every_field_of_others` compares
Corella's field tables with these names.
"""

import ast
import importlib
import json
import re
import sys
import tarfile
import typing
import zipfile
from importlib.metadata import version
from pathlib import Path

CHAT = "openai.types.chat."
RESPONSES = "openai.types.responses."
ANTHROPIC = "anthropic.types."
OLLAMA = "ollama._types."

# The types, by module and name, that each of Corella's field tables is compared with.
TYPES = {
    "ChatRequest": {"openai": [CHAT + "completion_create_params.CompletionCreateParamsStreaming"]},
    "ChatMessage": {
        "openai": [
            CHAT + "chat_completion_message_param.ChatCompletionMessageParam",
            CHAT + "ChatCompletionMessage",
            CHAT + "ParsedChatCompletionMessage",
        ]
    },
    "ChatText": {"openai": [CHAT + "chat_completion_content_part_text_param.ChatCompletionContentPartTextParam"]},
    "ToolCall": {
        "openai": [
            CHAT + "ChatCompletionMessageFunctionToolCall",
            CHAT + "ParsedFunctionToolCall",
            CHAT + "chat_completion_chunk.ChoiceDeltaToolCall",
        ]
    },
    "CalledFunction": {
        "openai": [
            CHAT + "chat_completion_message_function_tool_call.Function",
            CHAT + "parsed_function_tool_call.ParsedFunction",
        ]
    },
    "Tool": {"openai": [CHAT + "chat_completion_function_tool_param.ChatCompletionFunctionToolParam"]},
    "Function": {"openai": ["openai.types.shared_params.FunctionDefinition"]},
    "StreamOptions": {"openai": [CHAT + "chat_completion_stream_options_param.ChatCompletionStreamOptionsParam"]},
    "CompletionsRequest": {"openai": ["openai.types.completion_create_params.CompletionCreateParamsStreaming"]},
    "EmbeddingsRequest": {"openai": ["openai.types.embedding_create_params.EmbeddingCreateParams"]},
    "BatchesRequest": {"openai": ["openai.types.batch_create_params.BatchCreateParams"]},
    "BatchExpiry": {"openai": ["openai.types.batch_create_params.OutputExpiresAfter"]},
    "ResponsesRequest": {"openai": [RESPONSES + "response_create_params.ResponseCreateParamsStreaming"]},
    "TextOptions": {"openai": [RESPONSES + "response_text_config_param.ResponseTextConfigParam"]},
    "Reasoning": {"openai": ["openai.types.shared_params.Reasoning"]},
    "InputMessage": {
        "openai": [
            RESPONSES + "easy_input_message_param.EasyInputMessageParam",
            RESPONSES + "ResponseOutputMessage",
            RESPONSES + "ParsedResponseOutputMessage",
        ]
    },
    "InputText": {
        "openai": [
            RESPONSES + "response_input_text_param.ResponseInputTextParam",
            RESPONSES + "ResponseOutputText",
            RESPONSES + "ParsedResponseOutputText",
        ]
    },
    "ResponseTool": {"openai": [RESPONSES + "function_tool_param.FunctionToolParam"]},
    "InputCall": {
        "openai": [
            RESPONSES + "ResponseFunctionToolCall",
            RESPONSES + "ResponseFunctionToolCallItem",
            RESPONSES + "ParsedResponseFunctionToolCall",
            RESPONSES + "response_function_tool_call_param.ResponseFunctionToolCallParam",
        ]
    },
    "InputCallOutput": {
        "openai": [
            RESPONSES + "response_input_item_param.FunctionCallOutput",
            RESPONSES + "ResponseFunctionToolCallOutputItem",
        ]
    },
    "InputThought": {
        "openai": [
            RESPONSES + "ResponseReasoningItem",
            RESPONSES + "response_reasoning_item_param.ResponseReasoningItemParam",
        ]
    },
    "MessagesRequest": {
        "anthropic": [
            ANTHROPIC + "message_create_params.MessageCreateParamsStreaming",
            ANTHROPIC + "message_count_tokens_params.MessageCountTokensParams",
            ANTHROPIC + "beta.message_create_params.MessageCreateParamsStreaming",
        ]
    },
    "InputTurn": {
        "anthropic": [
            ANTHROPIC + "MessageParam",
            ANTHROPIC + "Message",
            ANTHROPIC + "ParsedMessage",
            ANTHROPIC + "beta.BetaMessage",
        ]
    },
    "TextBlock": {"anthropic": [ANTHROPIC + "TextBlockParam", ANTHROPIC + "TextBlock", ANTHROPIC + "ParsedTextBlock"]},
    "ThinkingBlock": {"anthropic": [ANTHROPIC + "ThinkingBlockParam", ANTHROPIC + "ThinkingBlock"]},
    "ToolUse": {
        "anthropic": [ANTHROPIC + "ToolUseBlockParam", ANTHROPIC + "ToolUseBlock", ANTHROPIC + "beta.BetaToolUseBlock"]
    },
    "ToolResult": {"anthropic": [ANTHROPIC + "ToolResultBlockParam"]},
    "MessageTool": {"anthropic": [ANTHROPIC + "ToolParam", ANTHROPIC + "beta.BetaToolParam"]},
    "MessageToolChoice": {"anthropic": [ANTHROPIC + "ToolChoiceParam"]},
    "Thinking": {"anthropic": [ANTHROPIC + "ThinkingConfigParam"]},
    "OutputConfig": {"anthropic": [ANTHROPIC + "OutputConfigParam", ANTHROPIC + "beta.BetaOutputConfigParam"]},
    "OllamaChatRequest": {"ollama": [OLLAMA + "ChatRequest"]},
    "OllamaGenerateRequest": {"ollama": [OLLAMA + "GenerateRequest"]},
    "OllamaEmbedRequest": {"ollama": [OLLAMA + "EmbedRequest"]},
    "OllamaEmbeddingsRequest": {"ollama": [OLLAMA + "EmbeddingsRequest"]},
    "OllamaShowRequest": {"ollama": [OLLAMA + "ShowRequest"]},
    "OllamaOptions": {"ollama": [OLLAMA + "Options"]},
    "OllamaMessage": {"ollama": [OLLAMA + "Message"]},
    "OllamaCall": {"ollama": [OLLAMA + "Message.ToolCall"]},
    "OllamaFunction": {"ollama": [OLLAMA + "Message.ToolCall.Function"]},
}

# vLLM's classes.
VLLM = {
    "ChatRequest": ["ChatCompletionRequest"],
    "CompletionsRequest": ["CompletionRequest"],
    "ResponsesRequest": ["ResponsesRequest"],
    "MessagesRequest": ["AnthropicMessagesRequest", "AnthropicCountTokensRequest"],
    "MessageTool": ["AnthropicTool"],
    "OutputConfig": ["AnthropicOutputConfig"],
    "StreamOptions": ["StreamOptions"],
    "TokenizeRequest": ["TokenizeCompletionRequest", "TokenizeChatRequest"],
    "DetokenizeRequest": ["DetokenizeRequest"],
    "EmbeddingsRequest": ["EmbeddingCompletionRequest", "EmbeddingChatRequest"],
    "ScoreRequest": ["ScoreDataRequest", "ScoreQueriesDocumentsRequest", "ScoreQueriesItemsRequest", "ScoreTextRequest"],
    "RerankRequest": ["RerankRequest"],
}

# The files of llama.cpp's server that read bodies, and the expressions that find field names in these files.
LLAMA_CPP = {
    "CompletionsRequest": {"server-schema.cpp": r'(?:new field_\w+|->add_alias)\(\s*"(\w+)"'},
    "ChatRequest": {
        "server-schema.cpp": r'(?:new field_\w+|->add_alias)\(\s*"(\w+)"',
        "server-common.cpp": r'\bbody(?:\.contains|\.at)?[\[(]"(\w+)"|json_value\(body, "(\w+)"',
    },
}

SUBFIELD = re.compile(r'->add_subfield\(\(new field_\w+\("(\w+)"')

# Parameters of Anthropic's library that it sends as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}


def load(path):
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def names_of(kind):
    """The fields of a class, or of all classes of a union."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if isinstance(kind, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
        return names_of(kind.__value__)
    if fields := getattr(kind, "model_fields", None):
        return set(fields) | {field.alias for field in fields.values() if field.alias}
    if typing.get_origin(kind) is not None and not isinstance(kind, type):
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        if typing.get_origin(kind) is typing.Union or len(parts) > 1:
            return set().union(*(names_of(part) for part in parts))
        return names_of(typing.get_origin(kind))
    return set(typing.get_type_hints(kind)) - HEADERS


def vllm_names(wheel):
    classes = {}
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if re.search(r"/entrypoints/.*protocol\.py$", name):
                for node in ast.walk(ast.parse(files.read(name))):
                    if isinstance(node, ast.ClassDef):
                        classes[node.name] = node

    def names(name):
        node = classes.get(name)
        if node is None:
            return set()
        own = {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.dump(item.annotation)
        }
        own = {name for name in own if not name.startswith("_")} - {"model_config", "field_names"}
        return own.union(*(names(base.id) for base in node.bases if isinstance(base, ast.Name)))

    missing = [name for names in VLLM.values() for name in names if name not in classes]
    assert not missing, f"not in the wheel: {missing}"
    return {table: set().union(*map(names, kinds)) for table, kinds in VLLM.items()}


def llama_cpp_names(sdist):
    texts = {}
    with tarfile.open(sdist) as files:
        for member in files:
            if "/tools/server/server-" in member.name and member.name.endswith(".cpp"):
                texts[Path(member.name).name] = files.extractfile(member).read().decode()
    found = {}
    for table, patterns in LLAMA_CPP.items():
        matches = (re.findall(pattern, texts[name]) for name, pattern in patterns.items())
        groups = (match if isinstance(match, tuple) else (match,) for some in matches for match in some)
        names = {name for group in groups for name in group if name}
        found[table] = names - set(SUBFIELD.findall(texts["server-schema.cpp"]))
    return found


def main():
    folder = Path(sys.argv[1])
    (wheel,) = folder.glob("vllm-*.whl")
    (sdist,) = folder.glob("llama_cpp_python-*.tar.gz")
    tables = {}
    for table, sources in TYPES.items():
        for source, paths in sources.items():
            tables.setdefault(table, {})[source] = set().union(*(names_of(load(path)) for path in paths))
    for source, found in [("vllm", vllm_names(wheel)), ("llama.cpp", llama_cpp_names(sdist))]:
        for table, names in found.items():
            tables.setdefault(table, {})[source] = names
    versions = {name: f"{name} {version(name)}" for name in ("openai", "anthropic", "ollama")}
    versions["vllm"] = "vLLM " + wheel.name.split("-")[1]
    versions["llama.cpp"] = "llama.cpp of llama-cpp-python " + sdist.name.removesuffix(".tar.gz").split("-")[1]
    found = {
        "versions": versions,
        "tables": {
            table: {source: sorted(names) for source, names in sources.items()} for table, sources in tables.items()
        },
    }
    path = Path(__file__).with_name("fields.json")
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
