"""`kvchaos serve`: an engine or the P/D proxy as a server."""

from __future__ import annotations

import logging

import click

from engine.config import PRESETS, EngineConfig, preset
from engine.errors import InputError

_DEFAULT_LEASE_MS = 30_000


def _address(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"--control {text}: use HOST:PORT")
    return host, int(port)


def _peers(values: tuple[str, ...]) -> dict[str, str]:
    peers = {}
    for value in values:
        engine_id, found, url = value.partition("=")
        if not engine_id or not found or not url.startswith(("http://", "https://")):
            raise InputError(f"--peer {value}: use ID=URL, such as producer=http://127.0.0.1:8100")
        peers[engine_id] = url
    return peers


host_option = click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; loopback unless told otherwise."
)
control_option = click.option(
    "--control",
    metavar="HOST:PORT",
    help="Let a harness inject faults through this address. Needs KVCHAOS_CONTROL_TOKEN. Never in production.",
)


@click.group()
def serve() -> None:
    """Run an engine or the P/D proxy as an OpenAI-compatible server."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


@serve.command()
@click.option("--role", type=click.Choice(["producer", "consumer"]), required=True, help="Names the engine by default.")
@click.option("--id", "engine_id", help="The engine's id, by which others read from it. Default: its role.")
@host_option
@click.option("--port", type=click.IntRange(1, 65535), required=True)
@click.option("--peer", "peers", multiple=True, metavar="ID=URL", help="An engine to read KV from; may be given again.")
@click.option("--model", type=click.Choice(sorted(PRESETS)), default="tiny", show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of the weights.")
@click.option("--block-size", type=click.IntRange(1, 1024), default=16, show_default=True)
@click.option("--num-blocks", type=click.IntRange(2, 1_000_000), default=256, show_default=True)
@click.option("--layout", type=click.Choice(["HND", "NHD"]), default="HND", show_default=True)
@click.option("--kv-dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16", show_default=True)
@click.option("--max-model-len", type=click.IntRange(1), help="Default: what the blocks hold.")
@click.option("--max-batched-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--max-num-seqs", type=click.IntRange(1), default=16, show_default=True)
@click.option("--steps-in-flight", type=click.IntRange(1, 8), default=2, show_default=True)
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True)
@click.option("--lease-ms", type=click.IntRange(1), default=_DEFAULT_LEASE_MS, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--kv-checksum-mode", type=click.Choice(["off", "log", "enforce"]), default="log", show_default=True)
@click.option("--kv-load-failure-policy", type=click.Choice(["fail", "recompute"]), default="fail", show_default=True)
@control_option
def engine(role: str, engine_id: str | None, host: str, port: int, peers: tuple[str, ...], **options: object) -> None:
    """Serve one engine: /v1/completions with streaming, /health, /metrics. KV moves through NIXL."""
    from engine.checksum.policy import ChecksumSettings
    from harness.serve import ServeOptions, serve_engine

    control = _address(options.pop("control"))  # type: ignore[arg-type]
    checksum = ChecksumSettings(
        kv_checksum_mode=options.pop("kv_checksum_mode"),  # type: ignore[arg-type]
        kv_load_failure_policy=options.pop("kv_load_failure_policy"),  # type: ignore[arg-type]
    )
    model = preset(str(options.pop("model")))
    lease = options.pop("lease_ms")
    config = EngineConfig(engine_id or role, model, checksum=checksum, lease_ticks=lease, **options)  # type: ignore[arg-type]
    serve_engine(config, ServeOptions(host, port, control, _peers(peers)))


@serve.command()
@click.option("--producer", required=True, metavar="URL", help="Where prompts are prefilled.")
@click.option("--consumer", required=True, metavar="URL", help="Where they are decoded.")
@host_option
@click.option("--port", type=click.IntRange(1, 65535), required=True)
@control_option
def proxy(producer: str, consumer: str, host: str, port: int, control: str | None) -> None:
    """Serve the proxy that sends a prompt to the producer and then, with what it answered, to the consumer."""
    from harness.serve import ServeOptions, serve_proxy

    serve_proxy(producer, consumer, ServeOptions(host, port, _address(control)))
