"""Serve an exported model over HTTP: requests are answered in batches, with abstention, alarms and a drift counter.

    python examples/serve.py model.pt2 --port 8000
    curl localhost:8000/predict -d '{"inputs": [[0.1, 0.2, 0.3]]}'
    curl localhost:8000/health

`model.pt2` is `torch.export.save(deploy(model).exported(x), "model.pt2")`. Each row of the answer has the fields of
`deploy`. Only the standard library and torch are needed; the drift counter also needs bayesify.
"""

import argparse
import json
import queue
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

LARGEST, WAIT, TIMEOUT, BODY = 64, 0.005, 30.0, 1 << 24  # rows, seconds, seconds, bytes


class Batcher(threading.Thread):
    """Run the model in one thread, on whatever requests have come in since the last batch."""

    def __init__(self, model, shape):
        super().__init__(daemon=True)
        self.model, self.shape = model, tuple(shape)
        self.waiting = queue.Queue()
        self.counts, self.pvalues = Counter(), deque(maxlen=10_000)

    def ask(self, rows):
        """Return the answers of one request, a list of dicts; ValueError for what is no input of the model."""
        x = torch.as_tensor(rows, dtype=torch.float32)
        if x.shape[1:] != self.shape or not len(x):
            raise ValueError(f"inputs must be of shape (rows, {', '.join(map(str, self.shape))}), got {tuple(x.shape)}")
        if not bool(x.isfinite().all()):
            raise ValueError("inputs must be finite numbers")
        answer = Future()
        self.waiting.put((x, answer))
        return answer.result(TIMEOUT)

    def run(self):
        """Collect requests, run them as one batch, and hand each its own rows."""
        while True:
            requests = [self.waiting.get()]
            until = time.monotonic() + WAIT
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
        padded = torch.cat([x, x]) if len(x) == 1 else x  # an exported batch has at least two rows
        with torch.no_grad():
            columns = {name: value[: len(x)].tolist() for name, value in self.model(padded).items()}
        self.counts.update(rows=len(x), answered=sum(columns.get("answer", [1] * len(x))))
        self.pvalues.extend(columns.get("novelty_pvalue", []))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def health(self):
        """Return what a monitor wants to know."""
        found = {"status": "ok" if self.is_alive() else "stopped", "waiting": self.waiting.qsize(), **self.counts}
        if self.pvalues:
            from bayesify import metrics

            found["drift"] = bool(metrics.drift(torch.tensor(list(self.pvalues))).alarm)
        return found


def handler(batcher):
    """Return the class that answers HTTP requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply(200, batcher.health()) if self.path == "/health" else self.reply(404, {"error": "no such page"})

        def do_POST(self):
            try:
                size = int(self.headers.get("Content-Length", 0))
                if size > BODY:
                    return self.reply(413, {"error": f"at most {BODY} bytes, got {size}"})
                body = self.rfile.read(size)
                if self.path != "/predict":
                    return self.reply(404, {"error": "no such page"})
                self.reply(200, {"answers": batcher.ask(json.loads(body)["inputs"])})
            except (ValueError, TypeError, KeyError) as error:
                self.reply(400, {"error": " ".join(str(error).split())[:300] or type(error).__name__})
            except Exception as error:
                self.reply(500, {"error": str(error)})

        def reply(self, status, content):
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    return Handler


class Server(ThreadingHTTPServer):
    """A thread per connection."""

    daemon_threads, request_queue_size = True, 128


def server(program, port, host="127.0.0.1"):
    """Return a server of an exported program; `serve_forever()` runs it."""
    example = next(i for i in program.example_inputs[0] if isinstance(i, torch.Tensor))
    batcher = Batcher(program.module(), example.shape[1:])
    batcher.start()
    return Server((host, port), handler(batcher))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the file that torch.export.save wrote")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1")
    options = parser.parse_args()
    serving = server(torch.export.load(options.model), options.port, options.host)
    print(f"serving on http://{options.host}:{serving.server_port}")
    serving.serve_forever()
