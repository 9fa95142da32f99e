"""A rank's process as its launcher sees it: hands its environment and descriptors to a fork server, and ends as the fork does.

Of Python's library it takes what is built in alone: `json` and `socket` would double the 12 ms of a core that its start takes.
"""

import _socket
import marshal
import posix
import sys


def main() -> None:
    """Usage: python -I -S forkserver_stub.py SOCKETS ARGUMENTS…; SOCKETS are paths, divided by ':', of which ranks take turns."""
    sockets = sys.argv[1].split(":")
    rank = posix.environ.get(b"PMI_RANK", b"0")
    own = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        own.connect(sockets[int(rank) % len(sockets)])
        descriptors = [0, 1, 2]
        if b"PMI_FD" in posix.environ:
            descriptors.append(int(posix.environ[b"PMI_FD"]))
        text = marshal.dumps((dict(posix.environ), posix.getcwd(), posix.getppid(), sys.argv[2:]))
        rights = b"".join(descriptor.to_bytes(4, sys.byteorder) for descriptor in descriptors)
        own.sendmsg([len(text).to_bytes(8, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        own.sendall(text)
        ended = own.recv(16)
    except OSError as error:
        sys.exit(f"no fork server: {error}. A test file may use MPI when it is imported; --fresh-ranks shows which.")
    if not ended:
        sys.exit("the fork server has ended")
    status = int(ended)
    if status < 0:
        import signal

        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        posix.kill(posix.getpid(), -status)
    posix._exit(status)


main()
