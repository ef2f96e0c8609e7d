"""Measures what llama.cpp's saved slots save: times to the first token of prompts beside those of `kv_disk.py`.

    python bench/kv_disk_llama.py LLAMA/build/bin/llama-server bf16.gguf [--prompt-tokens 2048] [--folder FOLDER]

`compare/README.md` says how to build llama.cpp, and how to make a GGUF file of a model of `bench/make_model.py`. FOLDER is
a folder on the disk. llama.cpp keeps no prompts in memory beside its slot. The slot computes each prompt and is saved to a
file. Then, for each prompt:

* computed: the prompt with 64 other tokens at its end, by an empty slot;
* restored: the slot is restored from its file, which was dropped from the page cache, and computes 64 other tokens. The
  time begins with the request to restore it.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from kv_disk import NUM_NEW, drop, make_prompts, measure_disk, spread
from node_process import free_port


class Llama:
    def __init__(self, options, folder):
        self.port = free_port()
        context = options.prompt_tokens + 2 * NUM_NEW
        command = [options.server, "-m", options.gguf, "-t", options.threads, "-c", context, "-np", 1, "--port", self.port,
                   "--slot-save-path", f"{folder}/", "--cache-ram", 0]  # fmt: skip
        with open(folder / "log", "wb") as log:
            command = [str(part) for part in command]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while True:
            assert self._process.poll() is None, (folder / "log").read_text()
            try:
                if self._ask("GET", "/health").status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)

    def stop(self):
        self._process.terminate()
        self._process.wait()

    def _ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse()

    def slot(self, action, **body):
        """Saves, restores or erases the slot."""
        response = self._ask("POST", f"/slots/0?action={action}", body)
        text = response.read()
        assert response.status == 200, text

    def first_token(self, prompt):
        """Streams an answer. Returns the time of its first token, and the number of cached prompt tokens."""
        body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": True, "id_slot": 0, "stream": True}
        response = self._ask("POST", "/completion", body)
        assert response.status == 200, response.read()
        first, cached = None, 0
        for line in response:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                event = json.loads(line.removeprefix(b"data: "))
                cached = event.get("timings", {}).get("cache_n", cached)
        return first, cached


def run(options, folder):
    """Returns the seconds to the first token with the cached tokens of each way, and the bytes of each saved slot."""
    prompts = make_prompts(options, options.prompt_tokens - NUM_NEW)
    rows, sizes = {"computed": [], "restored": []}, []
    llama = Llama(options, folder)
    for at, prompt in enumerate(prompts):
        llama.slot("erase")
        llama.first_token(prompt)
        llama.slot("save", filename=f"{at}.slot")
        sizes.append((folder / f"{at}.slot").stat().st_size)
    for at, prompt in enumerate(prompts):
        asked = prompt + [300] * NUM_NEW
        llama.slot("erase")
        begun = time.perf_counter()
        first, cached = llama.first_token(asked)
        rows["computed"].append((first - begun, cached))
        llama.slot("erase")
        drop(folder / f"{at}.slot")
        begun = time.perf_counter()
        llama.slot("restore", filename=f"{at}.slot")
        first, cached = llama.first_token(asked)
        rows["restored"].append((first - begun, cached))
    llama.stop()
    return rows, sizes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", help="a folder on the disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-disk-", dir=options.folder) as folder:
        rows, sizes = run(options, Path(folder))
        speed = measure_disk(Path(folder) / "0.slot", 1 << 30)
    computed = statistics.median(seconds for seconds, _ in rows["computed"])
    print(f"llama.cpp, {options.gguf.name}, {options.prompts} prompts of {options.prompt_tokens} tokens, "
          f"{statistics.median(sizes) / 1e6:.0f} MB a slot, disk {speed / 1e9:.2f} GB/s\n")  # fmt: skip
    print("| | cached | s to the first token (lowest to highest) | of computed |")
    print("|---|---|---|---|")
    for name, found in rows.items():
        seconds, cached = map(list, zip(*found))
        share = statistics.median(seconds) / computed
        print(f"| {name} | {statistics.median(cached):.0f} | {spread(seconds)} | {share:.3f} |")


if __name__ == "__main__":
    main()
