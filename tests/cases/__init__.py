"""Cases that people hit with other systems for parallel training: each reduced to a small model, with the placement that makes it bite."""
