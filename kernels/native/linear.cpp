// The products of linear layers, forward and backward, with what surrounds them: bias, residual sum, GELU, an adapter.

#include "product.h"

// c = a b + bias + start + left right: see `Product`. `sizes`: rows, columns, depth, the strides of a and b (row, column
// each), of start, c, left and right (row), rank. `tensors`: a, b, bias, start, c, sums, z, other, left, right; null
// where there is none. `finish`: 0 nothing, 1 GELU, 2 its gradient. `operands`: 0 floats, 1 fixed
// point of 16 bits, 2 of 8.
EXPORT int riftco_product(const int64_t *sizes, void *const *tensors, int64_t finish, int64_t operands,
                          int64_t threads) {
    auto in = [&](int i) { return static_cast<float *>(tensors[i]); };
    Product product{
        .rows = sizes[0],
        .columns = sizes[1],
        .depth = sizes[2],
        .a = {in(0), sizes[3], sizes[4]},
        .b = {in(1), sizes[5], sizes[6]},
        .more = {in(3), sizes[7], in(2), in(8), in(9), sizes[9], sizes[10], sizes[11]},
        .c = in(4),
        .c_row = sizes[8],
        .sums = in(5),
        .finish = Finish(finish),
        .z = in(6),
        .other = in(7),
        .operands = Operands(operands),
    };
    multiply(product, int(threads));
    return 0;
}
