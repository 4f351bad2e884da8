"""What ``autoshard.verify`` is made of: processes of this machine, a log of their collectives, and comparisons with one device."""
