// serve.cu of a shard whose clients' rows, and answers, are codes of 8 bits (--wire e4m3): kernels of their own, so that
// a server without them does not compile them.
#define WIRE_E4M3 1
#include "serve.cu"
