"""A server that speaks SGLang's HTTP form and says what a script tells it; it has no model."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import numpy as np

from agent_rl.engines.scripted import synthetic_rows
from agent_rl.types import TokenIds
from routing_cache import RowLayout

Say = Callable[[TokenIds, int], TokenIds | None]
"""What to say to a prompt under a sampling seed; None for prompts of nobody's episode."""


@dataclass
class ScriptedServer:
    """The state of one server. ``versions`` are the weight versions it was given, in order."""

    say: Say
    layout: RowLayout
    version: str = "start"
    versions: list[str] = field(default_factory=list[str])
    num_generated: int = 0

    def answer(self, path: str, body: dict[str, object]) -> dict[str, object]:
        match path:
            case "/server_info":
                return {
                    "version": "scripted",
                    "enable_return_routed_experts": True,
                    "context_length": 65536,
                    "max_running_requests": 64,
                }
            case "/model_info":
                return {"model_path": "scripted", "weight_version": self.version}
            case "/update_weight_version":
                self.version = str(body["new_version"])
            case "/update_weights_from_tensor" if "weight_version" in body:
                self.version = str(body["weight_version"])
                self.versions.append(self.version)
            case "/generate":
                return self._generate(body)
            case _:
                pass
        return {"success": True, "message": "ok"}

    def _generate(self, body: dict) -> dict[str, object]:
        prompt = np.array(body["input_ids"], np.int32)
        sampling = body["sampling_params"]
        said = self.say(prompt, sampling.get("sampling_seed", 0))
        if said is None:
            said = np.arange(sampling["max_new_tokens"], dtype=np.int32)
        said = said[: sampling["max_new_tokens"]]
        self.num_generated += 1
        reason = "stop" if int(said[-1]) in sampling.get("stop_token_ids", []) else "length"
        meta: dict[str, object] = {
            "id": body["rid"],
            "finish_reason": {"type": reason},
            "prompt_tokens": len(prompt),
            "cached_tokens": 0,
            "output_token_logprobs": [[-1.0 - 1e-4 * n, int(t), None] for n, t in enumerate(said)],
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(said)}],
        }
        if body.get("return_routed_experts"):
            fed = np.concatenate([prompt, said[:-1]])
            rows = synthetic_rows(fed, self.layout, int(self.version))
            rows = rows[body["routed_experts_start_len"] :].astype("<i4")
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        return {"output_ids": said.tolist(), "meta_info": meta}


@contextmanager
def running(server: ScriptedServer) -> Iterator[str]:
    """Serve on a free port; gives the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._reply(json.loads(data) if data else {})

        def _reply(self, body: dict[str, object]) -> None:
            data = json.dumps(server.answer(urlsplit(self.path).path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            del format, arguments

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
