// isa: name=amx rank=3 flags=-O3,-mavx512f,-mavx512bw,-mavx512dq,-mavx512vl,-mavx512cd,-mavx512bf16,-mavx512vnni,-mavx512vbmi,-mavx2,-mfma,-mf16c needs=amx
//
// The avx512 vocabulary; bf16 products run on tiles. Even and odd k are summed apart there, so numbers differ from
// vdpbf16ps in the last bits.

#define WEFT_TILES 1
#include "tile/isa/avx512.h"
#ifdef WEFT_TILE_MODEL
#include "tile/isa/tile_model.h"
#else
#include "tile/isa/tile_unit.h"
#endif
