"""Local servers of object storage for tests: moto (S3) and gcp-storage-emulator (GCS).

Their libraries conflict with versions in constraints.txt, so they may have an environment of their
own (`make test-storage` creates one):

  python -m venv FOLDER && FOLDER/bin/pip install 'moto[server]' gcp-storage-emulator
  STORAGE_PYTHON=FOLDER/bin/python python -m pytest tests/train/test_object_storage.py
"""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

PYTHON = os.environ.get("STORAGE_PYTHON", sys.executable)
_MODULES = dict(s3="moto.server", gs="gcp_storage_emulator")


def missing(scheme: str) -> str | None:
  """Return why there is no server; None if there is one."""
  found = subprocess.run([PYTHON, "-c", f"import {_MODULES[scheme]}"], capture_output=True)
  module = _MODULES[scheme].split(".")[0]
  return None if not found.returncode else f"{PYTHON} has no {module}: set STORAGE_PYTHON"


@contextlib.contextmanager
def serve(scheme: str, folder: pathlib.Path):
  """Run a server with an empty bucket `bucket`; yield the environment variables of its clients.

  Args:
    folder: for the log of the server.
  """
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  url = f"http://127.0.0.1:{port}"
  if scheme == "s3":
    more = ["-H", "127.0.0.1", "-p", str(port)]
    env = dict(AWS_ENDPOINT_URL=url, AWS_REGION="us-east-1")
    env |= dict(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")
  else:
    more = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", "--default-bucket=bucket"]
    env = dict(TENSORSTORE_GCS_HTTP_URL=url, GOOGLE_AUTH_TOKEN_FOR_TESTING="token")
  with open(folder / "server.log", "w") as log:
    words = [PYTHON, "-m", _MODULES[scheme], *more]
    server = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
  try:
    _wait(port, server)
    if scheme == "s3":
      urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=60)
    yield env
  finally:
    server.terminate()
    server.wait()


def _wait(port, server):
  for _ in range(600):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
      return
    assert server.poll() is None, "the server ended"
    time.sleep(0.1)
  raise TimeoutError(port)
