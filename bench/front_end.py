"""Measures the cost of requests beside the model: tokens/s of builds with the mock executor, whose steps take no time.

    python bench/front_end.py before/corella target/release/corella [--rounds 5] [--seconds 8]

Streamed chat from 16 connections: plain with both builds, then, with the second, with tools that the conversation may
call and with a schema that constrains the answer, which the mock is told to write. Needs wrk.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

NUM_CONNECTIONS = 16
NUM_TOKENS = 64
PLAIN = {
    "messages": [{"role": "user", "content": "Tell me about the harbour, its ships and the people who work there."}],
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "stream": True,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {name} of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    for name in ("weather", "population", "altitude", "timezone")
]
SCHEMA = {"type": "array", "items": {"type": "string"}}
# The answer is longer than NUM_TOKENS.
ANSWER = json.dumps(["the harbour of the old town", "ships that bring salt and wood"] * NUM_TOKENS)
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
LOADS = {"plain": {}, "tools": {"tools": TOOLS}, "schema": {"response_format": FORMAT}, "tools and schema": {"tools": TOOLS, "response_format": FORMAT}}


NANO = Path(__file__).parents[1] / "models" / "nano"
TEMPLATE = """{% if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>' }}
{# calls are <tool_call>{"name": ..., "arguments": ...}</tool_call> #}{% endif %}{% for message in messages %}
{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def make_model(folder):
    """Makes the built-in model with a template that reads tools."""
    for path in NANO.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    (Path(folder) / "chat_template.jinja").unlink(missing_ok=True)
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


class Server:
    def __init__(self, binary, model, port, *options):
        self.url = f"http://127.0.0.1:{port}"
        command = [binary, "serve", model, "--device", "mock", "--served-model-name", "it", "--port", str(port), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            if self.process.poll() is not None:
                sys.exit(f"{' '.join(map(str, command))} has ended")
            with suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self.url}/ready").read()
                return
            time.sleep(0.05)

    def num_tokens(self):
        for line in urllib.request.urlopen(f"{self.url}/metrics").read().decode().splitlines():
            if line.startswith("vllm:generation_tokens_total"):
                return float(line.split()[-1])
        sys.exit("the server does not count tokens")

    def speed(self, load, seconds):
        body = json.dumps({"model": "it", **PLAIN, **LOADS[load]})
        with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
            script.write(f'wrk.method = "POST"\nwrk.headers["content-type"] = "application/json"\nwrk.body = {json.dumps(body)}\n')
            script.flush()
            before, begun = self.num_tokens(), time.monotonic()
            command = ["wrk", "-t1", f"-c{NUM_CONNECTIONS}", f"-d{seconds}s", "-s", script.name, f"{self.url}/v1/chat/completions"]
            answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            if "Non-2xx" in answer:
                sys.exit(f"{load}: the server refused requests\n{answer}")
            return (self.num_tokens() - before) / (time.monotonic() - begun)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as model:
        make_model(model)
        servers = {
            "before": Server(options.before, model, 8191),
            "after": Server(options.after, model, 8192),
            "after, told an answer": Server(options.after, model, 8193, "--mock-dictation", ANSWER),
        }
    sides = [("before", "plain"), ("after", "plain"), ("after", "tools")]
    sides += [("after, told an answer", load) for load in LOADS]
    try:
        for server, load in sides:
            servers[server].speed(load, 2)
        rounds = [[servers[server].speed(load, options.seconds) for server, load in sides] for _ in range(options.rounds)]
    finally:
        for server in servers.values():
            server.process.terminate()
    print(f"{NUM_CONNECTIONS} connections, {options.rounds} rounds by turns of {options.seconds} s\n")
    print("| build | load | tokens/s | ratio to the first, median (lowest to highest) |\n|---|---|---|---|")
    for index, (server, load) in enumerate(sides):
        ratios = [speeds[index] / speeds[0] for speeds in rounds]
        speed = statistics.median(speeds[index] for speeds in rounds)
        print(f"| {server} | {load} | {speed:,.0f} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |")


if __name__ == "__main__":
    main()
