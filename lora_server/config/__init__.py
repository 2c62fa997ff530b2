"""Settings of `lora-server serve`: flag > environment (LORA_SERVER_*) > --config file > default.

serve      the settings, and those of the processes that a node starts     types    how their values are read
groups     how help and reference group the settings                      checks   which settings go together
sources    reading flags, environment and file
"""

from lora_server.config.checks import MOST_LED
from lora_server.config.serve import ProcessConfig, ServeConfig
from lora_server.config.sources import load

__all__ = ["MOST_LED", "ProcessConfig", "ServeConfig", "load"]
