"""Checks the table of names without an owner (`crates/corella-hub/names.json`) against the hub.

Each name has to lead to a repository that exists and asks for no permission, with a file of the default quantisation or
with safetensors, of an architecture that the book lists as served. Needs a network and nothing else:

    python tests/names/check_names.py [NAME …]

HF_ENDPOINT names another hub. Prints each repository with its size, and ends with status 1 if a name does not meet
these conditions.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "crates/corella-hub/names.json"
ENDPOINT = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
DEFAULT = "q4_k_m"


def get(path):
    request = urllib.request.Request(ENDPOINT + path, headers={"User-Agent": "corella-check-names"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer), answer.headers


def listing(repository):
    """All files with their sizes. Long listings come in pages."""
    path, files = f"/api/models/{repository}/tree/main?recursive=true&expand=false", {}
    while path:
        entries, headers = get(path)
        files |= {entry["path"]: entry["size"] for entry in entries if entry["type"] == "file"}
        link = headers.get("Link", "")
        path = link.split(">")[0].lstrip("<").removeprefix(ENDPOINT) if 'rel="next"' in link else None
    return files


def served():
    """The words in backquotes of the tables of architectures."""
    pages = [ROOT / "docs/src/real-model.md", ROOT / "docs/src/embeddings.md"]
    rows = [line for page in pages for line in page.read_text().splitlines() if line.startswith("| `")]
    return {word for row in rows for word in row.split("`")[1::2]}


def check(repository, architectures):
    """Returns the size of the default files, or raises ValueError."""
    info, _ = get(f"/api/models/{repository}")
    if info.get("gated") or info.get("private"):
        raise ValueError("asks for permission")
    if info.get("id", repository) != repository:
        raise ValueError(f"is now {info['id']}")
    files = listing(repository)
    if repository.lower().endswith("-gguf"):
        ggufs = {path: size for path, size in files.items() if path.endswith(".gguf") and "mmproj" not in path.lower()}
        chosen = {path: size for path, size in ggufs.items() if DEFAULT in path.lower()}
        if not chosen and len(ggufs) != 1:
            raise ValueError(f"has no {DEFAULT}, but {', '.join(ggufs) or 'no GGUF files'}")
        # A repository may have a model both as one file and in parts.
        single = {path: size for path, size in chosen.items() if "-of-" not in path}
        named = [info.get("gguf", {}).get("architecture")]
        size = sum((single or chosen or ggufs).values())
    else:
        weights = [path for path in files if path.endswith(".safetensors") and "/" not in path]
        if not weights or "config.json" not in files:
            raise ValueError("has no safetensors")
        named = get(f"/{repository}/resolve/main/config.json")[0].get("architectures", [])
        size = sum(files[path] for path in weights)
    if not architectures.intersection(named):
        raise ValueError(f"has the architecture {named}, which the book does not list")
    return size


def main():
    wanted, is_good, architectures = sys.argv[1:], True, served()
    for family in json.loads(TABLE.read_text()):
        for tag, repository in family["tags"]:
            name = f"{family['name']}:{tag}"
            if wanted and family["name"] not in wanted and name not in wanted:
                continue
            try:
                print(f"{name:32} {repository:64} {check(repository, architectures) / 1e9:6.2f} GB", flush=True)
            except (ValueError, urllib.error.URLError) as error:
                is_good = False
                print(f"{name:32} {repository:64} {error}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
