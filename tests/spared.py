"""A child for tests of what starts them: it says which process it is, and waits for its end."""

import os
import sys

from lora_server.daemon.processes import Up, say

if __name__ == "__main__" and sys.stdin.buffer.readline():
    say(Up(listen=str(os.getpid())))
    sys.stdin.buffer.read()
