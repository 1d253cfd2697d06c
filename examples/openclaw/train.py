"""Train whatever agent comes to the gateway: python3 examples/openclaw/train.py --config examples/openclaw/config.yaml k=v …"""

import sys

from areal.config.command_line import errors_as_sentences, load_command_line
from areal.train import PPOTrainer


def main() -> None:
    config = load_command_line(sys.argv[1:])
    with PPOTrainer(config) as trainer:
        trainer.train()


if __name__ == "__main__":
    with errors_as_sentences():
        main()
