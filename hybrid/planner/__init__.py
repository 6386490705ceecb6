"""What a layout needs and how fast it should be, from arithmetic alone: no torch, no devices."""
