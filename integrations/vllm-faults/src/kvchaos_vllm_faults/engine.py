"""The process of one role: a vLLM engine without a server, and commands over a pipe (`kvchaos_vllm_faults.protocol`).

    python -m kvchaos_vllm_faults.engine --role producer --model DIR --port 5601 --answers 3

Scheduler and worker run in this process and in its main thread, so that what happens can be watched and held.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}
"""What vLLM has to find in its environment, unless the environment says otherwise."""


def main(arguments: list[str] | None = None) -> None:
    """Run until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=("producer", "consumer"), required=True)
    parser.add_argument("--model", type=Path, help="a folder that vLLM can load; without it a small one is made")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/kvchaos"), help="where the small one is kept")
    parser.add_argument("--port", type=int, required=True, help="NIXL's side channel")
    parser.add_argument("--answers", type=int, required=True, help="the file descriptor to answer on")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--num-blocks", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=4064)
    parser.add_argument("--max-batched-tokens", type=int, default=256)
    parser.add_argument("--engine-args", default="{}", help="more of vLLM's engine arguments, as JSON")
    options = parser.parse_args(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(options.port)

    # Only now: vLLM reads the environment when it is imported.
    from kvchaos_vllm_faults.progress import wait_for_events
    from kvchaos_vllm_faults.protocol import Channel, serve
    from kvchaos_vllm_faults.role import RoleEngine

    wait_for_events()
    with os.fdopen(options.answers, "w", encoding="utf-8") as answers:
        channel = Channel(sys.stdin, answers)
        engine = RoleEngine(options, channel)
        channel.send({"ready": engine.about()})
        serve(channel, engine.commands)
        answers.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    # A process that made a NIXL agent can crash when the interpreter takes it down.
    os._exit(0)


if __name__ == "__main__":
    main()
