"""A rank's process as its launcher sees it: hands its environment and descriptors to a fork server, and ends as the fork does."""

import array
import json
import os
import signal
import socket
import sys


def main() -> None:
    """Usage: python -I -S forkserver_stub.py SOCKETS ARGUMENTS…; SOCKETS are paths, divided by ':', of which ranks take turns."""
    sockets = sys.argv[1].split(":")
    rank = os.environ.get("PMI_RANK", "0")
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        own.connect(sockets[int(rank) % len(sockets)])
        descriptors = [0, 1, 2]
        if "PMI_FD" in os.environ:
            descriptors.append(int(os.environ["PMI_FD"]))
        request = {"environment": dict(os.environ), "folder": os.getcwd(), "parent": os.getppid(), "arguments": sys.argv[2:]}
        text = json.dumps(request).encode()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        own.sendmsg([len(text).to_bytes(8, "little")], [rights])
        own.sendall(text)
        ended = own.recv(16)
    except OSError as error:
        sys.exit(f"no fork server: {error}. A test file may use MPI when it is imported; --fresh-ranks shows which.")
    if not ended:
        sys.exit("the fork server has ended")
    status = int(ended)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
