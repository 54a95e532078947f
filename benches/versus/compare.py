#!/usr/bin/env python3
"""Runs jobs on weact and on PyTorch in turn and prints a Markdown table. run.sh calls it.

Per job there are three workers, each with the job loaded: two of weact, whose difference shows what the measurement can't tell
apart, and one of PyTorch. In each round every worker works once while the others wait, in an order that rotates. Two rounds
before the counted ones warm up. If in any round the sides' losses or chosen tokens differ, they did not do the same job: that
ends the run with status 1.

A job is lora-BxS or full-BxS (one update on B rows of S tokens), prefill-N, or decode-N (N tokens after a prompt of 64;
decodebf16-N has our weights, not torch's, in bf16), of
SmolLM2 or, after small:, of a random model of four layers. --jobs takes several, with commas between them.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MADE = ROOT / "target" / "versus"
DEFAULT_JOBS = "lora-1x256,lora-4x512,full-1x256,prefill-1024,decode-64,decodebf16-64,small:lora-8x256,small:full-8x256"
WARM_UP = 2
REST_S = 0.2  # OpenMP's threads spin for a while after their work
TOLERANCE = 1e-3  # of losses, relative
QUIET = 0.05  # of all cores' time, that other processes may take
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

LEGEND = """\
s: median of the rounds. speed: torch's seconds by weact's, median of the rounds; above 1 weact is quicker. A/A: one copy of
weact's seconds by another's, 10th to 90th percentile of the rounds; what lies within is no difference. GiB: largest resident
memory of the process, start and loading included. memory: torch's by weact's; above 1 weact takes less."""


def main():
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_one, default=15, help="counted rounds of each job (15)")
    parser.add_argument("--jobs", type=job_list, default=DEFAULT_JOBS, help=f"which ({DEFAULT_JOBS.replace(',', ', ')})")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2", help="folder of SmolLM2 (models/smollm2)")
    parser.add_argument("--worker", type=Path, help="weact's worker, already built (built from this checkout)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where every number goes")
    arguments = parser.parse_args()

    folders = {"smollm2": arguments.model, "small": MADE / "small"}
    prepare(arguments.jobs, folders)
    worker = arguments.worker or build()
    versions = {"weact revision": output("git", "describe", "--always", "--dirty"), "compiler": output("rustc", "--version")}
    report = {"machine": machine(), "versions": versions, "rounds": arguments.rounds, "warm_up_rounds": WARM_UP, "jobs": []}
    for model, job in arguments.jobs:
        print(f"{model} {job} ..", file=sys.stderr)
        files = [job, folders[model], adapter(model)] if job.startswith("lora") else [job, folders[model]]
        commands = {
            "weact": [worker, *files],
            "weact again": [worker, *files],
            "torch": [sys.executable, HERE / "torch_worker.py", *files],
        }
        result = compare(commands, arguments.rounds)
        report["jobs"].append({"model": model, "job": job, **summary(job, result), **result})
        for end in result["ends"].values():
            versions.update(end["versions"])
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)


def at_least_one(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def job_list(text):
    """Model and job of each."""
    named = [name if ":" in name else f"smollm2:{name}" for name in text.split(",")]
    for name in named:
        if not re.fullmatch(r"(smollm2|small):((lora|full)-\d+x\d+|(prefill|decode|decodebf16)-\d+)", name):
            raise argparse.ArgumentTypeError(f"{name} is none of [small:]lora-BxS, full-BxS, prefill-N, decode-N, decodebf16-N")
    return [tuple(name.split(":")) for name in named]


def adapter(model):
    return MADE / f"adapter-{model}"


def prepare(jobs, folders):
    """Makes the files that the jobs load; SmolLM2 has to be there."""
    make = [sys.executable, HERE / "make_small.py"]
    for model in dict.fromkeys(model for model, _ in jobs):
        if not (folders[model] / "config.json").exists():
            if model == "smollm2":
                sys.exit(f"{folders[model]} holds no checkpoint: README.md says how to make it under 'With a real model'")
            subprocess.run([*make, "model", folders[model]], check=True)
        if not adapter(model).exists():
            subprocess.run([*make, "adapter", folders[model], adapter(model)], check=True)


def build():
    """weact's worker."""
    if subprocess.run(["cargo", "build", "--release", "--workspace", "--examples"], cwd=ROOT).returncode != 0:
        sys.exit("cargo build failed")
    return ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release" / "examples" / "versus"


class Worker:
    """A process that answers each line with one line of JSON."""

    def __init__(self, name, command):
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        with contextlib.suppress(BrokenPipeError):  # the missing answer says it
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"the worker of {self.name} ended with status {self.process.wait()}")
        return json.loads(answer)

    def round(self):
        """The answer, with the share of all cores' time meanwhile that went to other processes."""
        begun, others = time.perf_counter(), busy_s() - self.busy_s()
        answer = self.ask("go")
        others = busy_s() - self.busy_s() - others
        return {**answer, "others": others / (time.perf_counter() - begun) / os.cpu_count()}

    def busy_s(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S  # utime, stime


def busy_s():
    """Seconds that all cores together have worked, or were kept from it by the machine below."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def compare(commands, n_rounds):
    """What each worker answered in each round, warm-up first, and at the end."""
    rounds = {name: [] for name in commands}
    workers = []
    try:
        for name, command in commands.items():
            workers.append(Worker(name, command))
        for number in range(WARM_UP + n_rounds):
            for turn in range(len(workers)):
                worker = workers[(number + turn) % len(workers)]
                time.sleep(REST_S)
                rounds[worker.name].append(worker.round())
            check_same({name: answers[-1] for name, answers in rounds.items()}, number)
        return {"rounds": rounds, "ends": {worker.name: worker.ask("end") for worker in workers}}
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


def check_same(answers, number):
    torch = answers["torch"]
    for name, answer in answers.items():
        if torch["loss"] is None:
            same, what = answer["tokens"] == torch["tokens"], "tokens"
        else:
            same, what = abs(answer["loss"] - torch["loss"]) <= TOLERANCE * abs(torch["loss"]), "loss"
        if not same:
            found = f"{name} has {answer[what]}, torch {torch[what]}"
            sys.exit(f"the sides did not do the same job: in round {number + 1}, the {what} of {found}")


def summary(job, result):
    seconds = {name: [answer["s"] for answer in answers[WARM_UP:]] for name, answers in result["rounds"].items()}
    peaks = {name: end["peak_bytes"] for name, end in result["ends"].items()}
    losses = {name: [answers[0]["loss"], answers[-1]["loss"]] for name, answers in result["rounds"].items()}
    others = [answer["others"] for answers in result["rounds"].values() for answer in answers[WARM_UP:]]
    first, second, torch = seconds["weact"], seconds["weact again"], seconds["torch"]
    ratios = [t / ours for copy in (first, second) for t, ours in zip(torch, copy)]
    memory = max(peaks["weact"], peaks["weact again"])
    tokens = math.prod(int(number) for number in job.split("-")[1].split("x"))
    weact_s, torch_s = statistics.median(first + second), statistics.median(torch)
    return {
        "tokens": tokens,
        "weact_s": weact_s,
        "torch_s": torch_s,
        "weact_tokens_per_s": tokens / weact_s,
        "torch_tokens_per_s": tokens / torch_s,
        "speed": statistics.median(ratios),
        "speed_p10_p90": spread(ratios),
        "same_p10_p90": spread([a / b for a, b in zip(first, second)]),
        "weact_peak_bytes": memory,
        "torch_peak_bytes": peaks["torch"],
        "memory": peaks["torch"] / memory,
        "weact_losses": losses["weact"],
        "torch_losses": losses["torch"],
        "others": statistics.mean(others),
    }


def spread(values):
    """10th and 90th percentile."""
    deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
    return deciles[0], deciles[-1]


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform()}


def output(*command):
    """What a command prints, or None where it fails, as git does outside a repository."""
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def print_report(report):
    cpu, cores, system = report["machine"].values()
    print(f"{cpu}, {cores} cores, {system}")
    print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    print(f"float32, {report['rounds']} rounds after {WARM_UP} of warm-up")
    print()
    columns = [
        *("job", "weact s", "torch s", "weact tokens/s", "torch tokens/s", "speed", "A/A"),
        *("weact GiB", "torch GiB", "memory", "first loss, weact / torch", "last loss, weact / torch"),
    ]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for job in report["jobs"]:
        print(f"| {' | '.join(cells(job))} |")
    print()
    print(LEGEND)
    disturbed = [f"{job['model']} {job['job']} {job['others']:.0%}" for job in report["jobs"] if job["others"] > QUIET]
    if disturbed:
        print(f"\n**Not a measurement:** other processes took the cores' time, on average: {', '.join(disturbed)}.")


def cells(job):
    low, high = job["same_p10_p90"]
    losses = [
        f"{ours:.5f} / {torch:.5f}" if torch is not None else "same tokens"
        for ours, torch in zip(job["weact_losses"], job["torch_losses"])
    ]
    return [
        f"{job['model']} {job['job']}",
        f"{job['weact_s']:.3f}",
        f"{job['torch_s']:.3f}",
        f"{job['weact_tokens_per_s']:,.0f}",
        f"{job['torch_tokens_per_s']:,.0f}",
        f"{job['speed']:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{job['weact_peak_bytes'] / 2**30:.2f}",
        f"{job['torch_peak_bytes'] / 2**30:.2f}",
        f"{job['memory']:.2f}",
        *losses,
    ]


if __name__ == "__main__":
    main()
