"""Where adapter weights live: one interface; all resident in host memory for now."""
