"""Train a small model on several hosts with PyTorch's DistributedDataParallel over netsum or Gloo.

    torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --rdzv-backend c10d \\
        train.py --model cnn

on each host, with NETSUM_CONTROLLER, NETSUM_JOB and NETSUM_TOKEN set. Downloads nothing: the digits
are those of netsum's demo, and the text is Python's own help. Rank 0 prints a JSON object per line.

With --checkpoint and torchrun --max-restarts N, training continues after a rank has died; with
torchrun --nnodes 2:4 and a job of --ranks 4 --min-ranks 2 also with fewer ranks.
"""

import argparse
import csv
import gzip
import hashlib
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

DIGITS = pathlib.Path(__file__).resolve().parents[2] / "demo/digits.csv.gz"


class Digits:
    """Images of 8x8 pixels, and which digit each shows. One of five is kept back for the test."""

    batch = 32

    def __init__(self):
        with gzip.open(DIGITS, "rt") as file:
            rows = torch.tensor([[int(value) for value in row] for row in csv.reader(file)])
        # The file comes in the order of the writers.
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        self.images, self.labels = rows[:, :64].float().view(-1, 1, 8, 8) / 16, rows[:, 64]
        self.kept = len(rows) // 5

    def draw(self, generator):
        picked = torch.randint(self.kept, len(self.labels), (self.batch,), generator=generator)
        return self.images[picked], self.labels[picked]

    def test(self):
        return self.images[: self.kept], self.labels[: self.kept]


class Text:
    """Windows of the text of Python's help. The last tenth is kept for the test."""

    batch, window = 4, 32

    def __init__(self):
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        self.text = torch.tensor([number[character] for character in text])
        self.kept = len(text) // 10

    def windows(self, starts):
        windows = torch.stack([self.text[start : start + self.window + 1] for start in starts])
        return windows[:, :-1], windows[:, 1:]

    def draw(self, generator):
        most = len(self.text) - self.kept - self.window
        return self.windows(torch.randint(most, (self.batch,), generator=generator))

    def test(self):
        first = len(self.text) - self.kept
        return self.windows(range(first, len(self.text) - self.window - 1, self.kept // 32))


class Transformer(nn.Module):
    """Says which character comes next."""

    def __init__(self, characters, window, width=256, layers=2):
        super().__init__()
        self.character, self.place = nn.Embedding(characters, width), nn.Embedding(window, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, characters)
        # Masks later characters.
        self.hidden = torch.ones(window, window, dtype=torch.bool).triu(1)

    def forward(self, x):
        x = self.character(x) + self.place.weight[: x.shape[1]]
        return self.out(self.layers(x, self.hidden))


def mlp(_data):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn(_data):
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 1536),
        nn.ReLU(),
        nn.Linear(1536, 10),
    )


def transformer(data):
    return Transformer(len(data.characters), data.window)


# The data, the model, and how far a step goes.
MODELS = {
    "mlp": (Digits, mlp, 0.01),
    "cnn": (Digits, cnn, 0.001),
    "transformer": (Text, transformer, 0.001),
}


def loss_of(model, batch):
    inputs, wanted = batch
    return cross_entropy(model(inputs).flatten(0, -2), wanted.flatten())


def say(event, **what):
    # In one piece: ranks may share a terminal.
    print(json.dumps({"event": event, **what}) + "\n", end="", flush=True)


def fingerprint(model):
    """A hash of the weights' bits."""
    digest = hashlib.sha256()
    for weights in model.state_dict().values():
        digest.update(weights.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def save(file, step, model, optimizer):
    """Replaces the file in one go: a rank may be killed at any time."""
    new = file.with_name(f"{file.name}.new")
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, new)
    os.replace(new, file)


def resume(file, model, optimizer):
    """The step to begin with: rank 0 reads the file, and the others get what it has."""
    states = [torch.load(file) if dist.get_rank() == 0 and file.exists() else None]
    dist.broadcast_object_list(states)
    if states[0] is None:
        return 0
    model.load_state_dict(states[0]["model"])
    optimizer.load_state_dict(states[0]["optimizer"])
    return states[0]["step"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--backend",
        choices=["netsum", "hook", "gloo"],
        default="netsum",
        help="hook: netsum for the gradients, Gloo for the rest",
    )
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--checkpoint", type=pathlib.Path, metavar="FILE", help="resume there; save every 10 steps"
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="before and after the steps for a line on standard input",
    )
    args = parser.parse_args()
    if args.backend != "gloo":
        import netsum
        import netsum.torch
    dist.init_process_group("netsum" if args.backend == "netsum" else "gloo")
    torch.manual_seed(args.seed)
    data_of, model_of, rate = MODELS[args.model]
    data = data_of()
    model = DistributedDataParallel(model_of(data))
    comm = None
    if args.backend == "hook":
        comm = netsum.init()
        model.register_comm_hook(netsum.torch.HookState(comm, model), netsum.torch.comm_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    # Each rank draws other batches.
    generator = torch.Generator().manual_seed(args.seed * 1000 + dist.get_rank())
    first = resume(args.checkpoint, model.module, optimizer) if args.checkpoint else 0
    if first > 0:
        generator.manual_seed((args.seed + first) * 1000 + dist.get_rank())
        say("resumed", step=first, rank=dist.get_rank(), ranks=dist.get_world_size())

    def wait(event, **what):
        say(event, **what)
        if args.wait:
            sys.stdin.readline()

    wait("ready", floats=sum(p.numel() for p in model.parameters()))
    for step in range(first, args.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model, data.draw(generator))
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            say("step", step=step, loss=loss.item(), seconds=time.perf_counter() - began)
            if args.checkpoint and (step + 1) % 10 == 0:
                save(args.checkpoint, step + 1, model.module, optimizer)
    with torch.no_grad():
        test = loss_of(model.module, data.test()).item()
    wait(
        "trained",
        test=test,
        weights=fingerprint(model.module),
        **(comm.statistics() if comm else {}),
    )
    if comm:
        comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
