"""A model of a random shape, which Corella serves while a script compares its answers."""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import urllib.request


def read_arguments(description, families):
    """Reads the binary, families, seeds and instruction sets of a comparison."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("binary")
    parser.add_argument("--family", nargs="+", choices=families, default=list(families), metavar="NAME")
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 20), metavar=("FIRST", "END"))
    parser.add_argument("--isa", nargs="+", default=["portable", "avx2", "avx512", "avx512-bf16"], metavar="NAME")
    return parser.parse_args()


def run(args, compare, unit):
    """Compares each seed of each family, and ends the script.

    `compare(args, family, seed)` returns the number of compared units, the largest difference, and whether it is
    allowed.
    """
    num_wrong = 0
    for family in args.family:
        results = [compare(args, family, seed) for seed in range(*args.seeds)]
        numbers, differences, are_right = zip(*results, strict=True)
        num_other = len(results) - sum(are_right)
        counts = f"{len(results)} shapes, {sum(numbers)} {unit}"
        print(f"{family}: {counts}, largest difference {max(differences):.1e}, {num_other} others", flush=True)
        num_wrong += num_other
    sys.exit(f"{num_wrong} shapes differ" if num_wrong else 0)


@contextlib.contextmanager
def serving(binary, folder, options):
    """Starts a server, and gives a function that posts to it. If the server does not start, the script ends."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]

    def post(path, body):
        data = json.dumps({"model": folder.name} | body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    command = [binary, "serve", str(folder), "--port", str(port), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            said = []
            while not said or said[-1] and not said[-1].startswith("ready: "):
                said.append(server.stderr.readline())
            if not said[-1]:
                sys.exit("".join(said))
            yield post
        finally:
            server.terminate()
