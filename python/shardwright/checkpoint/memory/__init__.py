"""Steps of a training in memory that outlives its ranks: images in a guardian process, and copies on other hosts."""
