// The products of linear layers, forward and backward, with what surrounds them: bias, residual sum, GELU.

#include "product.h"

// c = a b + bias + start: see `Product`. `sizes`: rows, columns, depth, the strides of a and b (row, column each), of
// start and of c (row). `tensors`: a, b, bias, start, c, sums, z, other; null where there is none. `finish`: 0
// nothing, 1 GELU, 2 its gradient.
EXPORT int riftco_product(const int64_t *sizes, void *const *tensors, int64_t finish, int64_t threads) {
    auto in = [&](int i) { return static_cast<float *>(tensors[i]); };
    Product product{sizes[0],
                    sizes[1],
                    sizes[2],
                    {in(0), sizes[3], sizes[4]},
                    {in(1), sizes[5], sizes[6]},
                    in(2),
                    in(3),
                    sizes[7],
                    in(4),
                    sizes[8],
                    in(5),
                    Finish(finish),
                    in(6),
                    in(7)};
    multiply(product, int(threads));
    return 0;
}
