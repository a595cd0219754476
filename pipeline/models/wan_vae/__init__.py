"""Wan's VAE decoders, 2.1's and 2.2's residual one, from the weights of a diffusers AutoencoderKLWan."""
