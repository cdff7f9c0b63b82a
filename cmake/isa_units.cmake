# filled by the kernels layer
