"""`python -m llminfer` is the command `llminfer`."""
from llminfer.cli import app

if __name__ == "__main__": app(prog_name="llminfer")
