"""Trains corella-nano on the CPU. Start it again and it goes on where it stopped.

The order of the data depends on the seed and the step alone: batches come in chunks, and a
chunk is written from (seed, number of the chunk). The plan (steps, rates) is plan.json; it
is read again before each chunk, so its end can be moved while training runs.
"""

import os

# Two spinning threads on two busy cores wait for each other for ever.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import itertools
import json
import math
import random
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from tokenizers import Tokenizer

import corpus
from model import CONFIG, Nano, load_folder, mean_state

HERE = Path(__file__).parent
RUN = HERE / "run"
BATCH_TOKENS = 4096
CHUNK = 64  # steps
BUCKETS = (48, 64, 96, 128, 192, 256, 512)
LONG = (1024, 2048)
PICKED = 2048  # positions of a batch that count
END_OF_TEXT, IM_START, IM_END = 0, 1, 2
USER_WEIGHT = 0.1  # what a user says is worth knowing, what the model answers is the aim


class Encoder:
    def __init__(self):
        self.tok = Tokenizer.from_file(str(HERE / "tokenizer.json"))
        self.newline = self.ids("\n")
        self.head = {role: [IM_START] + self.ids(role + "\n") for role in ("system", "user", "assistant")}

    def ids(self, text):
        return self.tok.encode(text, add_special_tokens=False).ids

    def dialogue(self, messages):
        """Token ids as the chat template writes them, and what each is worth as a target."""
        ids, weights = [], []
        for role, text in messages:
            head, body = self.head[role], self.ids(text) + [IM_END]
            mine = role == "assistant"
            ids += head + body + self.newline
            weights += [0.0] * len(head) + [1.0 if mine else USER_WEIGHT] * len(body) + [0.0] * len(self.newline)
        return ids[:-len(self.newline)], weights[:-len(self.newline)]

    def plain(self, text):
        ids = self.ids(text) + [END_OF_TEXT]
        return ids, [0.5] * len(ids)


_encoder = None


def row_of(ids, weights, length):
    pad = length + 1 - len(ids)
    ids, weights = ids + [END_OF_TEXT] * pad, weights + [0.0] * pad
    return ids[:-1], ids[1:], weights[1:]


def make_chunk(seed, number, long_share, first_share, phrases, last, stranger, fresh):
    """CHUNK batches of (ids, targets, weights), each about BATCH_TOKENS big, in their order."""
    global _encoder
    _encoder = enc = _encoder or Encoder()
    rng = random.Random(f"{seed}-{number}")
    corpus.PHRASES, corpus.LAST, corpus.STRANGER, corpus.FRESH, corpus.FIRST_SHARE = phrases, last, 3 if stranger else 1, fresh, first_share
    size = lambda messages: 3 + len(enc.dialogue(messages)[0])
    batches = []
    for length in LONG:
        for _ in range(round(CHUNK * long_share / len(LONG))):
            batches.append([row_of(*enc.dialogue(corpus.long_dialogue(rng, lambda m: size(m) <= length)), length)
                            for _ in range(BATCH_TOKENS // length)])
    buckets = {length: [] for length in BUCKETS}
    want = CHUNK - len(batches)
    while sum(len(rows) // (BATCH_TOKENS // length) for length, rows in buckets.items()) < want:
        r = rng.random()
        if r < (0.04 if first_share else 0.02):
            ids, weights = enc.plain(corpus.plain_text(rng))
        elif r < 0.2:
            limit = rng.choice((256, 256, 512))
            ids, weights = enc.dialogue(corpus.long_dialogue(rng, lambda m: size(m) <= limit))
        else:
            ids, weights = enc.dialogue(corpus.dialogue(rng))
        length = next((b for b in BUCKETS if len(ids) <= b + 1), None)
        if length:
            buckets[length].append(row_of(ids, weights, length))
    for length, rows in buckets.items():
        n = BATCH_TOKENS // length
        batches += [rows[i:i + n] for i in range(0, len(rows) - n + 1, n)]
    rng.shuffle(batches)
    return [picked_batch(rng, rows) for rows in batches[:CHUNK]]


def picked_batch(rng, rows):
    """What the assistant says, and as much of the users' words as there is room for."""
    ids, targets, weights = (torch.tensor(part) for part in zip(*rows))
    targets, weights = targets.flatten(), weights.flatten()
    order = torch.rand(len(weights), generator=torch.Generator().manual_seed(rng.getrandbits(40)))
    picked = (order - weights * 10).argsort()[:PICKED]
    return ids, picked, targets[picked], weights[picked]


def held_out_batches(known_wordings):
    """Dialogues of held-out words, in fixed rows: the loss is that of the assistant's tokens."""
    enc, rows = Encoder(), {}
    for d in corpus.held_out(7, 24, known_wordings):
        ids, weights = enc.dialogue(d.messages)
        weights = [w if w == 1.0 else 0.0 for w in weights]
        length = next((b for b in BUCKETS if len(ids) <= b + 1), None)
        if length:
            rows.setdefault(length, []).append(row_of(ids, weights, length))
    return [tuple(torch.tensor(part) for part in zip(*r)) for r in rows.values()]


@torch.no_grad()
def held_out_loss(net, batches):
    total = weight = 0.0
    for ids, targets, w in batches:
        each = torch.nn.functional.cross_entropy(net(ids).flatten(0, 1).float(), targets.flatten(), reduction="none")
        total += float((each * w.flatten()).sum())
        weight += float(w.sum())
    return total / weight


class Muon:
    """Momentum whose steps are made orthogonal: every direction of a matrix learns at one speed."""

    def __init__(self, params, momentum=0.95):
        self.momentum = momentum
        groups = {}
        for p in params:
            groups.setdefault(tuple(sorted(p.shape)), []).append(p)
        self.groups = list(groups.values())
        self.buffers = [[torch.zeros_like(p) for p in g] for g in self.groups]

    @torch.no_grad()
    def step(self, lr, decay):
        for group, buffers in zip(self.groups, self.buffers):
            for p, b in zip(group, buffers):
                b.lerp_(p.grad, 1 - self.momentum)
            wide = [(p.grad.lerp(b, self.momentum)) for p, b in zip(group, buffers)]
            flip = [w.shape[0] > w.shape[1] for w in wide]
            x = torch.stack([w.T if f else w for w, f in zip(wide, flip)]).bfloat16()
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            a, b, c = 3.4445, -4.7750, 2.0315
            for _ in range(5):
                s = x @ x.transpose(1, 2)
                x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
            for p, u, f in zip(group, x.float(), flip):
                u = u.T if f else u
                p.mul_(1 - lr * decay).add_(u, alpha=-lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def rate(plan, step):
    """Warm up, stay at 1, then go along the knots of the plan: (step, rate), in a line between two."""
    if step < plan["warmup"]:
        return (step + 1) / plan["warmup"]
    knots = plan["decay"]
    for (a, high), (b, low) in zip(knots, knots[1:]):
        if a <= step < b:
            return high + (low - high) * (step - a) / (b - a)
    return 1.0 if step < knots[0][0] else knots[-1][1]


def save(path, value):
    temporary = path.with_suffix(".tmp")
    torch.save(value, temporary)
    os.replace(temporary, path)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--plan", default=str(HERE / "plan.json"))
    args.add_argument("--run", default=str(RUN))
    args.add_argument("--begin-with", help="a folder whose weights the last part of the plan begins with, where its states are gone")
    args.add_argument("--eager", action="store_true", help="compile nothing, which pays where steps are few or cores are busy")
    args = args.parse_args()
    run = Path(args.run)
    run.mkdir(exist_ok=True)
    plan = json.loads(Path(args.plan).read_text())
    torch.manual_seed(plan["seed"])
    torch.set_num_threads(2)
    net = Nano(CONFIG)
    matrices = [p for n, p in net.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in net.named_parameters() if not (p.dim() == 2 and "embed" not in n)]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)
    step, clock = 0, 0.0
    last = run / "last.pt"
    again = {int(step): [run / f"state_{n}.pt" for n in mean_of] for step, mean_of in plan["again"].items()}
    ready = [step for step, parts in again.items() if all(part.exists() for part in parts)]

    def begin_again(step, state):
        """From the mean of what training has come to, with nothing in motion."""
        net.load_state_dict(state)
        save(run / f"state_begun_{step}.pt", {"net": net.state_dict(), "step": step})
        adam.state.clear()
        for b in itertools.chain(*muon.buffers):
            b.zero_()

    if last.exists():
        state = torch.load(last, weights_only=False)
        net.load_state_dict(state["net"])
        adam.load_state_dict(state["adam"])
        muon.buffers = state["muon"]
        step, clock = state["step"], state["clock"]
        print(f"going on at step {step}", flush=True)
    elif args.begin_with:
        step = max(again)
        begin_again(step, load_folder(args.begin_with).state_dict())
        print(f"beginning at step {step}, with the weights of {args.begin_with}", flush=True)
    elif ready:
        step = max(ready)
        begin_again(step, mean_state(again[step]))
        print(f"beginning at step {step}, with the mean of earlier states", flush=True)
    first = step
    held = held_out_batches(known_wordings=True)
    torch._dynamo.config.recompile_limit = 4 * (len(BUCKETS) + len(LONG))  # each shape is its own program
    if not args.eager:
        net.compile_parts()
    log = open(run / "log.jsonl", "a")
    pool = ProcessPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    ahead = {}

    def chunk(number):
        for n in (number, number + 1):
            if n not in ahead:
                share = plan["long_share"] if n * CHUNK >= plan["long_from"] else 0.0
                first_share = max((knot for knot in plan["first_share"] if n * CHUNK >= knot[0]), default=(0, 0.0))[1]
                ahead[n] = pool.submit(make_chunk, plan["seed"], n, share, first_share, *(n * CHUNK >= plan[part] for part in ("phrases_from", "last_from", "stranger_from", "fresh_from")))
        return ahead.pop(number).result()

    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    began = saved = time.time()
    recent = []
    batches = None
    while True:
        if batches is None or step % CHUNK == 0:
            plan = json.loads(Path(args.plan).read_text())
            if step < plan["steps"]:
                batches = chunk(step // CHUNK)
        done = step >= plan["steps"]
        if done or step % plan["held_out_every"] == 0:
            with torch.compiler.set_stance("force_eager"):
                value = held_out_loss(net, held)
            print(f"step {step} held-out {value:.4f} perplexity {math.exp(value):.3f}", flush=True)
            log.write(json.dumps({"step": step, "held_out": round(value, 4), "clock": round(clock)}) + "\n")
            log.flush()
        if step in plan["ends"] and step != first:
            save(run / f"state_{step}.pt", {"net": net.state_dict(), "step": step})
        if step in again and step != first:
            begin_again(step, mean_state(again[step]))
        if done or stop or time.time() - saved > 180:
            save(last, {"net": net.state_dict(), "adam": adam.state_dict(), "muon": muon.buffers, "step": step, "clock": clock})
            saved = time.time()
        if done or stop:
            break
        batch = batches[step % CHUNK]
        scale = rate(plan, step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = net.loss(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for group in adam.param_groups:
            group["lr"] = plan["adam_rate"] * scale
        adam.step()
        muon.step(plan["muon_rate"] * scale, plan["weight_decay"])
        for p in net.parameters():
            p.grad = None
        recent.append(loss.item())
        step += 1
        clock, began = clock + time.time() - began, time.time()
        if step % 20 == 0 or step < 8:
            mean = sum(recent) / len(recent)
            recent = []
            log.write(json.dumps({"step": step, "loss": round(mean, 4), "clock": round(clock)}) + "\n")
            log.flush()
            print(f"step {step} loss {mean:.4f} rate {scale:.3f} {clock:.0f} s {step * BATCH_TOKENS / clock:.0f} tokens/s", flush=True)
    pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
