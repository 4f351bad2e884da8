#!/bin/sh
# Four questions that engineers bring, each as a command: sh examples/questions.sh 1 (or 2, 3, 4). Nothing is downloaded, no GPU is needed.
set -e
cd "$(dirname "$0")/.."

case "$1" in
1)  # A GPT of 175 billion parameters on 128 A100s: what plan, how many GB on each rank, how many tokens a second?
    autoshard explain examples/gpt2.py:gpt3_175b --mesh 128 --precision bf16 ;;
2)  # 13 billion parameters on 32 A100s: what does the search find, and how well does it scale?
    autoshard explain examples/gpt2.py:gpt3_13b --mesh 32 --precision bf16 ;;
3)  # The same nodes, joined by 25 Gb/s Ethernet instead of InfiniBand: what changes?
    plans=$(mktemp -d)
    autoshard explain examples/gpt2.py:gpt3_13b --mesh 32 --precision bf16 --cluster a100-dgx --format json > "$plans/infiniband.json"
    autoshard explain examples/gpt2.py:gpt3_13b --mesh 32 --precision bf16 --cluster a100-ethernet --format json > "$plans/ethernet.json"
    autoshard diff "$plans/infiniband.json" "$plans/ethernet.json" || test $? -eq 1 ;;  # 1: they differ
4)  # Data parallel, ZeRO, FSDP or Megatron? The plans that those would run, beside ours.
    autoshard compare examples/gpt2.py:gpt3_13b --mesh 32 --precision bf16 ;;
*)
    echo "usage: sh examples/questions.sh 1|2|3|4" >&2
    exit 2 ;;
esac
