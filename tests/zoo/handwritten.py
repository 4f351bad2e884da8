"""Models as people write them: no attention, or attention of their own; every output a loss and something else."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

BATCH = 8


class UNet(nn.Module):
    """Three levels down and up; every level of the way down is read again on the way up."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width << i, width << (i + 1), 3, stride=2, padding=1) for i in range(3))
        self.norm = nn.ModuleList(nn.GroupNorm(4, width << (i + 1)) for i in range(3))
        self.up = nn.ModuleList(nn.ConvTranspose2d(width << (i + 1), width << i, 2, stride=2) for i in reversed(range(3)))
        self.join = nn.ModuleList(nn.Conv2d(2 * width << i, width << i, 3, padding=1) for i in reversed(range(3)))
        self.leave = nn.Conv2d(width, 5, 1)

    def forward(self, image, mask):
        x, skips = F.silu(self.enter(image)), []
        for down, norm in zip(self.down, self.norm):
            skips.append(x)
            x = F.silu(norm(down(x)))
        for up, join in zip(self.up, self.join):
            x = F.silu(join(torch.cat([up(x), skips.pop()], 1)))
        logits = self.leave(x)
        return F.cross_entropy(logits, mask), logits


def unet():
    return UNet(), {"image": torch.randn(BATCH, 3, 16, 16), "mask": torch.randint(0, 5, (BATCH, 16, 16))}


class DCGAN(nn.Module):
    """The generator's step: transposed convolutions make an image, a critic of convolutions judges it."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(12, 4 * width, 4), nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.InstanceNorm2d(2 * width, affine=True), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.critic = nn.Sequential(
            nn.Conv2d(3, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(4 * width, 1, 4),
        )  # fmt: skip

    def forward(self, noise, real):
        fake = self.generator(noise[:, :, None, None])
        judged = torch.cat([self.critic(fake).flatten(), self.critic(real).flatten()])
        wanted = torch.cat([torch.ones(len(noise)), torch.zeros(len(real))])
        return F.binary_cross_entropy_with_logits(judged, wanted), fake


def dcgan():
    return DCGAN(), {"noise": torch.randn(BATCH, 12), "real": torch.randn(BATCH, 3, 16, 16)}


class Recurrent(nn.Module):
    """Words, a recurrent layer in both directions, the next one forward, a tag for each word."""

    def __init__(self, kind: type):
        super().__init__()
        self.words = nn.Embedding(51, 16)
        self.both = kind(16, 12, batch_first=True, bidirectional=True)
        self.forth = kind(24, 20, batch_first=True)
        self.tags = nn.Linear(20, 7)

    def forward(self, words, tags):
        x, _ = self.both(self.words(words))
        x, last = self.forth(x)
        logits = self.tags(x)
        return F.cross_entropy(logits.flatten(0, 1), tags.flatten()), logits, last


def tagged(samples: int = 2 * BATCH):
    """Recurrent layers divide samples only: enough of them for two axes after micro-batches."""
    return {"words": torch.randint(0, 51, (samples, 9)), "tags": torch.randint(0, 7, (samples, 9))}


def lstm():
    return Recurrent(nn.LSTM), tagged()


def gru():
    return Recurrent(nn.GRU), tagged()


class GraphNetwork(nn.Module):
    """Messages along edges, added up where they arrive. The graphs of a batch are laid side by side as one graph."""

    def __init__(self, width: int = 16, rounds: int = 2):
        super().__init__()
        self.enter = nn.Linear(5, width)
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.leave = nn.Linear(width, 3)

    def forward(self, nodes, source, target, labels):
        batch, count, _ = nodes.shape
        first = torch.arange(batch)[:, None] * count
        source, target = (source + first).flatten(), (target + first).flatten()
        x = F.relu(self.enter(nodes)).flatten(0, 1)
        for message, update in zip(self.message, self.update):
            sent = F.relu(message(torch.cat([x[source], x[target]], -1)))
            received = torch.zeros_like(x).index_add(0, target, sent)
            x = x + F.relu(update(torch.cat([x, received], -1)))
        logits = self.leave(x.unflatten(0, (batch, count)).mean(1))
        return F.cross_entropy(logits, labels), logits


def graph_network():
    edges = torch.randint(0, 10, (2, BATCH, 24))
    labels = torch.randint(0, 3, (BATCH,))
    return GraphNetwork(), {"nodes": torch.randn(BATCH, 10, 5), "source": edges[0], "target": edges[1], "labels": labels}


class MeshNetwork(nn.Module):
    """Messages along the edges of one fixed mesh, which is a buffer: weather on a grid."""

    def __init__(self, points: int = 12, width: int = 16):
        super().__init__()
        self.register_buffer("source", torch.arange(2 * points) % points)
        self.register_buffer("target", (torch.arange(2 * points) * 5 + 1) % points)
        self.enter, self.leave = nn.Linear(4, width), nn.Linear(width, 4)
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, state, following):
        x = self.enter(state)
        for _ in range(2):
            sent = F.gelu(self.message(torch.cat([x[:, self.source], x.index_select(1, self.target)], -1)))
            received = x.new_zeros(x.shape).index_add_(1, self.target, sent)
            x = self.norm(x + self.update(torch.cat([x, received], -1)))
        change = self.leave(x)
        return F.mse_loss(state + change, following), change


def mesh_network():
    return MeshNetwork(), {"state": torch.randn(BATCH, 12, 4), "following": torch.randn(BATCH, 12, 4)}


class DLRM(nn.Module):
    """Recommendation: bags of categories and dense features, all pairs of which interact."""

    def __init__(self, sizes: tuple[int, ...] = (37, 101, 53), width: int = 16):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, width, mode="sum") for size in sizes)
        self.bottom = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        fields = len(sizes) + 1
        self.register_buffer("pairs", torch.tril_indices(fields, fields, -1))
        self.top = nn.Sequential(nn.Linear(width + fields * (fields - 1) // 2, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense, bags, clicked):
        x = self.bottom(dense)
        fields = torch.stack([x, *(table(bag) for table, bag in zip(self.tables, bags))], 1)
        products = fields @ fields.transpose(1, 2)
        rows, columns = self.pairs[0], self.pairs[1]
        logits = self.top(torch.cat([x, products[:, rows, columns]], 1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, clicked), logits


def dlrm():
    bags = [torch.randint(0, size, (BATCH, length)) for size, length in ((37, 1), (101, 4), (53, 3))]
    return DLRM(), {"dense": torch.randn(BATCH, 6), "bags": bags, "clicked": torch.randint(0, 2, (BATCH,)).float()}


class Mixer(nn.Module):
    """MLPs over patches and over channels in turn."""

    def __init__(self, patches: int = 16, width: int = 24, layers: int = 2):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.across = nn.ModuleList(nn.Sequential(nn.Linear(patches, 20), nn.GELU(), nn.Linear(20, patches)) for _ in range(layers))
        self.within = nn.ModuleList(nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)) for _ in range(layers))
        self.leave = nn.Linear(width, 11)

    def forward(self, images, labels):
        x = self.patches(images).flatten(2).mT
        for i, (across, within) in enumerate(zip(self.across, self.within)):
            x = x + across(self.norms[2 * i](x).mT).mT
            x = x + within(self.norms[2 * i + 1](x))
        logits = self.leave(x.mean(1))
        return F.cross_entropy(logits, labels, label_smoothing=0.1), logits


def mlp_mixer():
    return Mixer(), {"images": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 11, (BATCH,))}


class DenseExperts(nn.Module):
    """A mixture of experts with dense dispatch (a one-hot einsum with a capacity), and a loss that balances them."""

    def __init__(self, experts: int = 4, width: int = 16, hidden: int = 24, capacity: int = 32):
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.words, self.router = nn.Embedding(51, width), nn.Linear(width, experts, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(experts, width, hidden) / 4), nn.Parameter(torch.randn(experts, hidden, width) / 5)
        self.leave = nn.Linear(width, 51)

    def forward(self, words, labels):
        x = self.words(words)
        gates = self.router(x).softmax(-1)
        weight, chosen = gates.topk(2, -1)
        chosen = F.one_hot(chosen, self.experts).float()  # b s 2 e
        place = (chosen.flatten(1, 2).cumsum(1) - 1).view_as(chosen) * chosen  # each token's place in the queue of its expert
        slot = F.one_hot(place.sum(-1).long(), self.capacity).float() * (place.sum(-1) < self.capacity)[..., None]
        dispatch = torch.einsum("bske,bskc->bsec", chosen, slot)
        combine = torch.einsum("bsk,bske,bskc->bsec", weight, chosen, slot)
        inside = torch.einsum("bsec,bsd->becd", dispatch, x)
        inside = torch.einsum("bech,ehd->becd", F.relu(torch.einsum("becd,edh->bech", inside, self.up)), self.down)
        x = x + torch.einsum("bsec,becd->bsd", combine, inside)
        logits = self.leave(x)
        balance = self.experts * (gates.mean((0, 1)) * chosen.sum(2).mean((0, 1))).sum()
        return F.cross_entropy(logits.transpose(1, 2), labels) + 0.01 * balance, logits


def dense_experts():
    return DenseExperts(), {"words": torch.randint(0, 51, (BATCH, 12)), "labels": torch.randint(0, 51, (BATCH, 12))}


class TwoTowers(nn.Module):
    """Queries against documents, other documents of the batch as negatives, both ways; a temperature is learned."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.words = nn.Embedding(61, width)
        self.query = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width))
        self.document = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, query, document):
        q = F.normalize(self.query(self.words(query).mean(1)), dim=-1)
        d = F.normalize(self.document(self.words(document).mean(1)), dim=-1)
        scores = q @ d.T * self.temperature.exp()
        right = torch.arange(len(query))
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2, q, d


def two_towers():
    return TwoTowers(), {"query": torch.randint(0, 61, (BATCH, 5)), "document": torch.randint(0, 61, (BATCH, 9))}


class Diffusion(nn.Module):
    """A step of diffusion training: noise by a schedule, a convolutional denoiser told the time by a sinusoidal embedding."""

    def __init__(self, width: int = 16, steps: int = 50):
        super().__init__()
        self.register_buffer("signal", torch.cumprod(1 - torch.linspace(1e-4, 0.05, steps), 0))
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, 2 * width))
        self.enter, self.middle = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.leave = nn.GroupNorm(4, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, image, noise, step):
        signal = self.signal[step][:, None, None, None]
        noisy = signal.sqrt() * image + (1 - signal).sqrt() * noise
        rates = torch.exp(torch.arange(self.width // 2) * (-math.log(10000) / (self.width // 2)))
        angles = step[:, None].float() * rates[None]
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], -1)).chunk(2, -1)
        x = self.enter(noisy)
        x = self.norm(x) * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
        guess = self.leave(x + self.middle(F.silu(x)))
        weight = (signal / (1 - signal)).clamp(max=5.0).flatten()
        return (weight * F.mse_loss(guess, noise, reduction="none").mean((1, 2, 3))).mean(), guess


def diffusion():
    image, noise = torch.randn(BATCH, 3, 8, 8), torch.randn(BATCH, 3, 8, 8)
    return Diffusion(), {"image": image, "noise": noise, "step": torch.randint(0, 50, (BATCH,))}


class Nested(nn.Module):
    """Takes a nested batch, returns nested dicts with numbers and nothing in them, one loss of several tasks."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(width, 5), "size": nn.Linear(width, 1)})

    def forward(self, features, targets, scale: float = 0.5):
        x = self.body(features["left"] + features["right"])
        kind, size = self.heads["kind"](x), self.heads["size"](x).squeeze(-1)
        losses = {"kind": F.cross_entropy(kind, targets["kind"]), "size": F.smooth_l1_loss(size, targets["size"])}
        loss = losses["kind"] + scale * losses["size"]
        outputs = {"heads": {"kind": kind, "size": [size]}, "hidden": (x,), "count": 2, "cache": None}
        return {"loss": loss, "parts": {k: v.detach() for k, v in losses.items()}, "outputs": outputs}


def nested():
    features = {"left": torch.randn(BATCH, 7), "right": torch.randn(BATCH, 7)}
    targets = {"kind": torch.randint(0, 5, (BATCH,)), "size": torch.randn(BATCH)}
    return Nested(), {"features": features, "targets": targets}


class ComplexRotary(nn.Module):
    """Attention whose positions are turns of complex numbers, as in Meta's Llama."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2, length: int = 12):
        super().__init__()
        rates = 1.0 / 10000 ** (torch.arange(0, width // heads, 2) / (width // heads))
        turns = torch.outer(torch.arange(length), rates)
        self.register_buffer("turns", torch.polar(torch.ones_like(turns), turns), persistent=False)
        self.heads, self.words = heads, nn.Embedding(51, width)
        nn.init.normal_(self.words.weight, std=0.1)  # it makes the logits as well
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers + 1))

    def turn(self, x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[: x.shape[1], None]).flatten(-2).type_as(x)

    def forward(self, words, labels):
        x = self.words(words)
        for qkv, out, norm in zip(self.qkv, self.out, self.norms):
            q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in qkv(norm(x)).chunk(3, -1))
            q, k, v = (t.transpose(1, 2) for t in (self.turn(q), self.turn(k), v))
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        logits = F.linear(self.norms[-1](x), self.words.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1)), logits


def complex_rotary():
    return ComplexRotary(), {"words": torch.randint(0, 51, (BATCH, 12)), "labels": torch.randint(0, 51, (BATCH, 12))}
