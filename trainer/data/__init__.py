"""From a name or a folder to prepared loaders: sources -> dataset -> sampler, transforms -> loaders."""
