"""Ray: that of this machine alone, which begins and ends with the server, or a cluster that is there already."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

from tegrad.errors import TegradError
from tegrad.installed import pip_install, search_path
from tegrad.llm.errors import OutOfMemory
from tegrad.llm.start import gpus
from tegrad.serve.config import Bounds, ConfigError
from tegrad.serve.replica import Call, Replica
from tegrad.serve.wire import EngineError

LOOPBACK: Final = "127.0.0.1"
STORE_BYTES: Final = 80 << 20
"""Of Ray's shared memory, which nothing here uses: the least that it takes."""
HEALTH_S: Final = 1.0
"""Seconds between two looks at whether a replica's engine runs."""
REACH_S: Final = 10.0
ALONE: Final = {
    "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0", "RAY_worker_niceness": "0",
}  # fmt: skip
"""For a Ray of our own: who has no token is refused, nothing is told to anybody, and it ends no process because memory
is short, as a Jetson's is by design, and makes no way for others."""


class Cluster:
    """A `replicas.Home`. Made by `running`."""

    def __init__(self, bounds: Bounds, address: str | None, ray: Any) -> None:
        self.bounds, self._alone, self._ray = bounds, address is None, ray
        self.host: str = LOOPBACK if self._alone else ray.util.get_node_ip_address()

    @classmethod
    @contextmanager
    def running(cls, bounds: Bounds, address: str | None) -> Iterator[Self]:
        """Ray, at an address or else started here; nothing that was started is left. To be entered in the main thread,
        with which Ray's processes end. ConfigError, EngineError."""
        if address is None and (there := gpus()) is not None and there < bounds.most:
            raise ConfigError(f"{bounds.most} replicas need a GPU each, this machine has {there}: ask for fewer")
        if address is None:
            os.environ.update(ALONE, RAY_AUTH_TOKEN=secrets.token_hex(32), PYTHONPATH=search_path())
        ray = _imported()
        folder = tempfile.mkdtemp(prefix="tegrad-ray-") if address is None else None
        try:
            try:
                if folder is None:
                    _reach(str(address))
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
                else:
                    ray.init(
                        address="local", num_cpus=bounds.most, num_gpus=bounds.most, include_dashboard=False,
                        object_store_memory=STORE_BYTES, log_to_driver=False, logging_level=logging.ERROR,
                        _node_ip_address=LOOPBACK, _temp_dir=folder,
                    )  # fmt: skip
                ray.serve.start(proxy_location="Disabled")  # it is us who speak HTTP
            except Exception as error:  # Ray raises a bare one where its processes take too long
                where = f"cannot use Ray at {address}" if address else "Ray does not start"
                said = next(iter(str(error).splitlines()), type(error).__name__)
                raise EngineError(f"{where}: {said} (docs/replicas.md)") from error
            yield cls(bounds, address, ray)
        finally:
            if folder is not None:
                ray.shutdown()
                shutil.rmtree(folder, ignore_errors=True)

    def start(self, call: Call) -> None:
        """See `replicas.Home`. OutOfMemory where GPUs are missing."""
        free = int(self._ray.available_resources().get("GPU", 0))
        if free < self.bounds.least:
            raise OutOfMemory(
                f"{self.bounds.least} replicas of {call.name} need a GPU each, and {free} are free: "
                "ask for fewer replicas, or add machines (`ray status`, docs/replicas.md)"
            )
        serve = self._ray.serve
        made = serve.deployment(
            Replica, name="replica", num_replicas=self.bounds.most, ray_actor_options={"num_cpus": 0, "num_gpus": 1},
            health_check_period_s=HEALTH_S, graceful_shutdown_timeout_s=1, graceful_shutdown_wait_loop_s=0.1,
        )  # fmt: skip
        serve.run_many(
            [serve.RunTarget(made.bind(call), name=call.app, route_prefix=None)],
            wait_for_ingress_deployment_creation=False, wait_for_applications_running=False,
        )  # fmt: skip

    def stop(self, app: str) -> None:
        """See `replicas.Home`."""
        self._ray.serve.delete(app)
        if not self._alone and not self._ray.serve.status().applications:
            self._ray.serve.shutdown()


def _reach(address: str) -> None:
    """OSError for a cluster where nobody listens: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), REACH_S).close()


def _imported() -> Any:
    try:
        import ray
        import ray.serve
    except ModuleNotFoundError as error:
        raise TegradError(f"replicas need Ray Serve ({error.name} is missing): {pip_install('replicas')}") from None
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return ray
