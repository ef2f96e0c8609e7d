"""Measures a server's time until it is ready, and how much slower its first request is than later ones.

    python bench/start_up.py target/release/corella [MODEL] [--threads 2 ...]
"""

import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

RUNS, PORT = 5, 8177
URL = f"http://127.0.0.1:{PORT}"
BODY = json.dumps({"messages": [{"role": "user", "content": "Tell me a story about a fox named Ben."}],
                   "temperature": 0, "max_tokens": 64}).encode()


def post(path, body=b""):
    began = time.monotonic()
    request = urllib.request.Request(URL + path, body, {"content-type": "application/json"}, method="POST")
    urllib.request.urlopen(request).read()
    return time.monotonic() - began


def wait_until_ready():
    while True:
        try:
            return urllib.request.urlopen(URL + "/ready").read()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.005)


def run(command):
    began = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready()
        ready = time.monotonic() - began
        first = post("/v1/chat/completions", BODY)
        post("/reset_prefix_cache")
        return ready, first / post("/v1/chat/completions", BODY), first / post("/v1/chat/completions", BODY)
    finally:
        server.terminate()
        server.wait()


def main():
    binary, *options = sys.argv[1:]
    rows = [run([binary, "serve", *options, "--port", str(PORT)]) for _ in range(RUNS)]
    rows.append([statistics.median(column) for column in zip(*rows)])
    print("| run | ready, s | first / second (cold cache) | first / third (warm cache) |\n|---|---|---|---|")
    for name, row in zip([*range(1, RUNS + 1), "median"], rows):
        print(f"| {name} | {row[0]:.3f} | {row[1]:.2f} | {row[2]:.2f} |")


if __name__ == "__main__":
    main()
