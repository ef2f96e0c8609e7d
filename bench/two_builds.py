"""Compares builds of Corella by turns: their prefill, their decode, and each operation if all builds know --profile.

    python bench/two_builds.py ROUNDS BINARY BINARY... -- ARGS of corella generate
    python bench/two_builds.py 5 before/corella after/corella -- MODEL --threads 2 --ignore-eos --prompt-tokens 512 \\
        --max-tokens 33

Name a build twice to see the difference between runs of the same build.
"""

import argparse
import re
import statistics
import subprocess
import sys

SPEED = re.compile(r"(prefill|decode)\s+(\d+) tokens\s+([\d.]+) s ")
SECTION = re.compile(r"(prefill|decode)\s+ms a step")
OPERATION = re.compile(r"  (\w[\w ,]*?) +([\d.]+) ")


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-2000:]}")
    return done


def generate(command):
    """Returns the milliseconds of the prompt, of each later token, and of each operation of a step."""
    times, section = {}, None
    for line in run(command).stderr.splitlines():
        if speed := SPEED.match(line):
            phase, num_tokens, seconds = speed[1], int(speed[2]), float(speed[3])
            times[phase] = 1e3 * seconds / (num_tokens if phase == "decode" else 1)
        elif begins := SECTION.match(line):
            section = begins[1]
        elif section and (operation := OPERATION.match(line)):
            times[f"{section}: {operation[1]}"] = float(operation[2])
    return times


def main():
    parser = argparse.ArgumentParser(usage="%(prog)s ROUNDS BINARY BINARY... -- ARGS of corella generate")
    parser.add_argument("rounds", type=int)
    parser.add_argument("binaries", nargs="+")
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    options, arguments = parser.parse_args(given[:at]), given[at + 1 :]
    if options.rounds < 1 or len(options.binaries) < 2:
        parser.error("needs a round or more, and two binaries or more")
    if all("--profile" in run([binary, "generate", "--help"]).stdout for binary in options.binaries):
        arguments.append("--profile")
    rounds = [[generate([binary, "generate", *arguments]) for binary in options.binaries] for _ in range(options.rounds)]
    print(f"| ms, best of {options.rounds} (median) | {' | '.join(options.binaries)} |")
    print("|---|" + "---|" * len(options.binaries))
    # A build may have operations that another build lacks.
    for name in dict.fromkeys(name for times in rounds[0] for name in times):
        cells = []
        for at in range(len(options.binaries)):
            times = [builds[at][name] for builds in rounds if name in builds[at]]
            cells.append(f"{min(times):.3f} ({statistics.median(times):.3f})" if times else "")
        print(f"| {name} | {' | '.join(cells)} |")


main()
