"""Writes held-out dialogues as the chat template puts them, a JSON object a line: text that no
training has seen, for `corella bench perplexity`.

    python documents.py [DIALOGUES PER SKILL] > documents.jsonl
"""

import json
import sys

import corpus

for dialogue in corpus.held_out(7, int(sys.argv[1]) if len(sys.argv) > 1 else 100):
    text = "\n".join(f"<|im_start|>{role}\n{said}<|im_end|>" for role, said in dialogue.messages)
    print(json.dumps({"text": text}))
