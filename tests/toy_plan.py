"""A plan written by hand: what the planner would say of a GPT-2 with 12 layers on mesh 2,2,2. The numbers are invented but consistent."""

from __future__ import annotations

from autoshard.mesh import Mesh
from autoshard.planning.plan import CollectiveRow, OpRow, Plan, StageRow

BATCH, SEQUENCE, WIDTH, VOCABULARY, MICROBATCHES = 16, 1024, 768, 50257, 8
TOKENS = BATCH * SEQUENCE // MICROBATCHES  # of one micro-batch
ACTIVATION = TOKENS // 2 * WIDTH * 4  # bytes of one data rank's residual stream
FLOPS_PER_SECOND = 15e12

# module below the layer, op, (inner, outer) sizes of a matmul or None, choices, layout of the result, weights
LAYER = [
    ("ln_1", "native_layer_norm", None, ["shard b", "replicate"], "[S(0), R*]", {"weight": "[R, R]", "bias": "[R, R]"}),
    ("attn.c_attn", "addmm", (WIDTH, 3 * WIDTH), ["shard n", "shard m"], "[S(0), S(1/3)]", {"weight": "[R, S(1/3)]", "bias": "[R, S(0/3)]"}),  # noqa: E501 (a table)
    ("attn", "scaled_dot_product_attention", (SEQUENCE, 2 * WIDTH), ["shard b", "shard h"], "[S(0), S(1)]", {}),
    ("attn.c_proj", "addmm", (WIDTH, WIDTH), ["shard n", "shard k"], "[S(0), P]", {"weight": "[R, S(0)]", "bias": "[R, R]"}),
    ("", "add", None, ["shard b", "replicate"], "[S(0), R]", {}),
    ("ln_2", "native_layer_norm", None, ["shard b", "replicate"], "[S(0), R*]", {"weight": "[R, R]", "bias": "[R, R]"}),
    ("mlp.c_fc", "addmm", (WIDTH, 4 * WIDTH), ["shard n", "shard m"], "[S(0), S(1)]", {"weight": "[R, S(1)]", "bias": "[R, S(0)]"}),
    ("mlp.act", "gelu", None, ["shard b", "shard d"], "[S(0), S(2)]", {}),
    ("mlp.c_proj", "addmm", (4 * WIDTH, WIDTH), ["shard n", "shard k"], "[S(0), P]", {"weight": "[R, S(0)]", "bias": "[R, R]"}),
    ("", "add", None, ["shard b", "replicate"], "[S(0), R]", {}),
]
HEAD_WEIGHT = {"transformer.wte.weight": "[R, S(0)]"}
FIRST = [
    ("transformer.wte", "embedding", None, ["shard b", "shard v"], "[S(0), P]", HEAD_WEIGHT),
    ("transformer.wpe", "embedding", None, ["shard s", "replicate"], "[R, R]", {"transformer.wpe.weight": "[R, R]"}),
    ("transformer", "add", None, ["shard b", "replicate"], "[S(0), R]", {}),
]
LAST = [
    ("transformer.ln_f", "native_layer_norm", None, ["shard b", "replicate"], "[S(0), R*]",
     {"transformer.ln_f.weight": "[R, R]", "transformer.ln_f.bias": "[R, R]"}),
    ("lm_head", "linear", (WIDTH, VOCABULARY), ["shard b", "shard n"], "[S(0), S(2)]", HEAD_WEIGHT),
    ("", "cross_entropy_loss", None, ["shard n", "shard v"], "[P, R]", {}),
]  # fmt: skip


def toy_plan() -> Plan:
    """The plan; every call returns a new one."""
    ops, collectives = [], []

    def op(stage, module, name, sizes, choices, layout, weights):
        split = 2 ** sum(choice.startswith("shard") for choice in choices)
        flops = 2.0 * TOKENS * sizes[0] * sizes[1] if sizes else 0.0
        forward = flops / split / FLOPS_PER_SECOND if sizes else 20e-6
        source = f"modeling_gpt2.py:{100 + len(LAYER)}: {name}"
        node = f"{name}_{len(ops)}"
        ops.append(OpRow(node, f"aten.{name}", module, source, stage, choices, layout, [], weights, flops, split, forward, 2 * forward))

    def collective(kind, axis, value, module, why, direction, stage, nbytes, runs=MICROBATCHES):
        seconds = 10e-6 + nbytes / 200e9
        collectives.append(CollectiveRow(kind, axis, value, module, "modeling_gpt2.py:110", why, direction, stage, nbytes, seconds, runs))

    for row in FIRST:
        op(0, *row)
    collective("all_reduce", "tensor", "embedding", "transformer.wte", "[S(0), P] -> [S(0), R], wanted by add", "forward", 0, ACTIVATION)
    for layer in range(12):
        stage, path = layer // 6, f"transformer.h.{layer}"
        for module, name, sizes, choices, layout, weights in LAYER:
            full = f"{path}.{module}" if module else path
            op(stage, full, name, sizes, choices, layout, {f"{full}.{weight}": at for weight, at in weights.items()})
        for norm in ("ln_1", "ln_2"):
            why = "[S(0), R] -> [S(0), R*], wanted by addmm"
            collective("all_reduce", "tensor", norm, f"{path}.{norm}", why, "backward", stage, ACTIVATION)
        for product in ("attn.c_proj", "mlp.c_proj"):
            why = f"[S(0), P] -> [S(0), R], wanted by add_{2 * layer + 1}"
            collective("all_reduce", "tensor", f"addmm_{layer}", f"{path}.{product}", why, "forward", stage, ACTIVATION)
            for weight in ("weight", "bias"):
                name = f"{path}.{product}.{weight}"
                collective("all_reduce", "data", name, f"{path}.{product}", f"gradient of {name}", "step", stage, WIDTH * WIDTH * 4, 1)
    for row in LAST:
        op(1, *row)
    for part in ("maximum", "sum of exponentials", "picked logit"):
        collective("all_reduce", "tensor", "cross_entropy_loss", "", f"{part} over the vocabulary", "forward", 1, TOKENS / 2 * 4)
    why = "transformer.h.5 -> transformer.h.6, activations"
    collective("send", "pipeline", "add_62", "transformer.h.5", why, "forward", 0, ACTIVATION)
    collective("send", "pipeline", "add_62", "transformer.h.5", why, "backward", 1, ACTIVATION)
    for stage in (0, 1):
        why = "gradient of transformer.wte.weight, held by stages 0, 1"
        collective("all_reduce", "pipeline", "transformer.wte.weight", "lm_head", why, "step", stage, VOCABULARY * WIDTH * 2, 1)

    def stage_row(index, first, last, parameters, in_flight):
        rows = [row for row in ops if row.stage == index]
        memory = {"parameters": 4.0 * parameters, "gradients": 4.0 * parameters, "optimizer": 8.0 * parameters,
                  "activations": in_flight * 6 * 17.0 * ACTIVATION, "transient": 4.0 * ACTIVATION}  # fmt: skip
        seconds = sum(row.forward + row.backward for row in rows) + 8e-4
        return StageRow(index, first, last, len(rows), parameters, seconds, 9e-4, in_flight, memory, rank=index)

    stages = [
        stage_row(0, "transformer.wte", "transformer.h.5", 41_350_272, 2),
        stage_row(1, "transformer.h.6", "lm_head", 40_564_608, 1),
    ]
    slowest = max(stage.seconds for stage in stages)
    step = sum(stage.seconds for stage in stages) + (MICROBATCHES - 1) * slowest + 9e-4
    compute = MICROBATCHES * slowest - MICROBATCHES * 8e-4
    breakdown = {"compute": compute, "data": 6e-4, "tensor": MICROBATCHES * 7e-4, "pipeline": MICROBATCHES * 1e-4 + 3e-4}
    breakdown["bubble"] = step - sum(breakdown.values())
    return Plan(
        mesh=Mesh(2, 2, 2),
        cluster="a100-dgx",
        microbatches=MICROBATCHES,
        schedule="1F1B",
        strategies={row.node: row.choices for row in ops},
        stages={row.node: row.stage for row in ops},
        params={name: layout for row in ops for name, layout in row.weights.items()},
        fingerprint="0123456789abcdef",
        model="GPT2LMHeadModel",
        parameter_count=124_439_808,
        samples=BATCH,
        tokens=BATCH * SEQUENCE,
        ops=ops,
        collectives=collectives,
        stage_rows=stages,
        memory_limit=80 * 2.0**30,
        step_seconds=step,
        breakdown=breakdown,
        bubble=breakdown["bubble"] / step,
        efficiency=0.81,
        one_device_seconds=0.81 * 8 * step,
        solver={"name": "HiGHS", "status": "optimal", "seconds": 1.92, "objective": step, "bound": step * 0.9996, "gap": 0.0004,
                "ops": 53, "folded": 210, "strategies": 812, "variables": 20_417, "trace_seconds": 3.4, "plan_seconds": 6.1,
                "cut": {"objective": slowest, "bound": slowest, "blocks": 14}, "notes": ["a note of the planner"]},
    )  # fmt: skip
