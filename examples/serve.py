"""Serve a deployed model over HTTP: requests are answered in batches, with abstention, alarms and a test for drift.

    python examples/serve.py model.pt2 --port 8000
    curl localhost:8000/predict -d '{"inputs": [[0.1, 0.2, 0.3]]}'
    curl localhost:8000/health

`model.pt2` is what `deploy(model).save("model.pt2", x)` writes; each row of an answer has its fields. The standard
library and torch are enough; the test for drift, in windows of 10,000 rows, needs bayesify.
"""

import argparse
import json
import queue
import threading
import time
from collections import Counter
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

LARGEST, WAIT, TIMEOUT, BODY, KEPT = 64, 0.005, 30.0, 1 << 24, 10_000  # rows, seconds, seconds, bytes, p-values


class Batcher(threading.Thread):
    """Run the model in one thread, on whatever requests have come in since the last batch."""

    def __init__(self, program, held_out):
        super().__init__(daemon=True)
        example = next(i for i in program.example_inputs[0] if isinstance(i, torch.Tensor))
        self.model, self.shape, self.held_out = program.module(), tuple(example.shape[1:]), held_out
        self.waiting, self.counts, self.pvalues = queue.Queue(), Counter(), []

    def ask(self, rows):
        """Return the answers of one request, a list of dicts; ValueError for what is no input of the model."""
        x = torch.as_tensor(rows, dtype=torch.float32)
        if x.shape[1:] != self.shape or not len(x) or not bool(x.isfinite().all()):
            shape = f"(rows, {', '.join(map(str, self.shape))})"
            raise ValueError(f"inputs must be finite and of shape {shape}, got {tuple(x.shape)}")
        answer = Future()
        self.waiting.put((x, answer))
        return answer.result(TIMEOUT)

    def run(self):
        """Collect requests, run them as one batch, and hand each its own rows."""
        while True:
            requests, until = [self.waiting.get()], time.monotonic() + WAIT
            while sum(len(x) for x, _ in requests) < LARGEST and (left := until - time.monotonic()) > 0:
                try:
                    requests.append(self.waiting.get(timeout=left))
                except queue.Empty:
                    break
            try:
                answers = self.answers(torch.cat([x for x, _ in requests]))
                for x, answer in requests:
                    answer.set_result([answers.pop(0) for _ in x])
            except Exception as error:  # a request must never wait forever
                for _, answer in requests:
                    answer.done() or answer.set_exception(RuntimeError(f"the model failed: {error}"))

    def answers(self, x):
        """Return one dict per row."""
        with torch.no_grad():
            columns = {name: value.tolist() for name, value in self.model(x).items()}
        self.counts.update(rows=len(x), answered=sum(columns.get("answer", [1] * len(x))))
        self.pvalues = (self.pvalues if len(self.pvalues) < KEPT else []) + columns.get("novelty_pvalue", [])
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def health(self):
        """Return what a monitor wants to know."""
        found = {"status": "ok" if self.is_alive() else "stopped", "waiting": self.waiting.qsize(), **self.counts}
        if self.pvalues:
            from bayesify import metrics

            found["drift"] = metrics.drift(torch.tensor(self.pvalues), held_out=self.held_out).alarm
        return found


class Handler(BaseHTTPRequestHandler):
    """Answer one connection's requests."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply(200, self.server.batcher.health()) if self.path == "/health" else self.reply(404, "no such page")

    def do_POST(self):
        try:
            size = int(self.headers.get("Content-Length", 0))
            if size > BODY:
                self.close_connection = True  # the body stays unread
                return self.reply(413, f"at most {BODY} bytes, got {size}")
            body = self.rfile.read(size)
            if self.path != "/predict":
                return self.reply(404, "no such page")
            self.reply(200, {"answers": self.server.batcher.ask(json.loads(body)["inputs"])})
        except (ValueError, TypeError, KeyError) as error:
            self.reply(400, " ".join(str(error).split())[:300] or type(error).__name__)
        except Exception as error:
            self.reply(500, str(error))

    def reply(self, status, content):
        text = json.dumps({"error": content} if isinstance(content, str) else content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """A thread per connection."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, program, port, host="127.0.0.1", held_out=None):
        super().__init__((host, port), Handler)
        self.batcher = Batcher(program, held_out)
        self.batcher.start()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the file that `save` wrote")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1")
    options, about = parser.parse_args(), {"novelty": ""}
    program = torch.export.load(options.model, extra_files=about)
    held_out = json.loads(about["novelty"])["held_out"] if about["novelty"] else None
    serving = Server(program, options.port, options.host, held_out)
    print(f"serving on http://{options.host}:{serving.server_port}")
    serving.serve_forever()
