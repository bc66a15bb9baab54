"""A local S3 server for tests: moto, of this environment or of that of MOTO_PYTHON.

moto pins libraries that constraints.txt has in other versions, so it may have its own environment:

  python -m venv /tmp/moto && /tmp/moto/bin/pip install 'moto[server]'
  MOTO_PYTHON=/tmp/moto/bin/python python -m pytest tests/train/test_object_storage.py
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request

PYTHON = os.environ.get("MOTO_PYTHON", sys.executable)


def missing() -> str | None:
  """Return why there is no server; None if there is one."""
  found = subprocess.run([PYTHON, "-c", "import flask, moto.server"], capture_output=True)
  return None if not found.returncode else f"{PYTHON} has no moto[server]; set MOTO_PYTHON"


@contextlib.contextmanager
def s3_server(log):
  """Run a server with an empty bucket `bucket`; yield the environment variables of its clients."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  url = f"http://127.0.0.1:{port}"
  words = [PYTHON, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
  with open(log, "w") as file:
    server = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
  try:
    _wait(f"{url}/moto-api/", server)
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"))
    yield dict(
      AWS_ENDPOINT_URL=url,
      AWS_ACCESS_KEY_ID="key",
      AWS_SECRET_ACCESS_KEY="secret",
      AWS_REGION="us-east-1",
    )
  finally:
    server.terminate()
    server.wait()


def _wait(url, server):
  for _ in range(300):
    try:
      urllib.request.urlopen(url, timeout=5)
      return
    except OSError:
      assert server.poll() is None, "the server ended"
      time.sleep(0.1)
  raise TimeoutError(url)
