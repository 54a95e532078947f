//! Rows added to some rows of a matrix: the gradient of an embedding, added to that of the output head where the two are tied.

use burn::{
    backend::{
        Backend, Dispatch, Flex, backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Tensor},
};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{
    Operators,
    buffer::Buffer,
    flex::{contiguous, dims, indices, rows_at_a_time, values},
};

/// `out[ids[i]] = matrix[ids[i]] + rows[i]` for each `i` in order, and `matrix` elsewhere; without gradients.
///
/// # Shapes
/// - `matrix` and output: `[n_rows, d]`, `ids`: `[n]`, `rows`: `[n, d]`
pub fn add_rows(operators: Operators, matrix: Tensor<2>, ids: Tensor<1, Int>, rows: Tensor<2>) -> Tensor<2> {
    match operators {
        Operators::Composed => matrix.select_assign(0, ids, rows, burn::tensor::IndexingUpdateOp::Add),
        Operators::Fused => {
            let (matrix, ids, rows) = (matrix.into_dispatch(), ids.into_dispatch(), rows.into_dispatch());
            Tensor::from_dispatch(<Dispatch as AddRows>::fused_add_rows(matrix, ids, rows))
        }
    }
}

#[backend_extension(Flex)]
trait AddRows: Backend {
    fn fused_add_rows(matrix: FloatTensor<Self>, ids: IntTensor<Self>, rows: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl AddRows for Flex {
    fn fused_add_rows(matrix: FlexTensor, ids: FlexTensor, rows: FlexTensor) -> FlexTensor {
        let (matrix, rows) = (contiguous(matrix), contiguous(rows));
        let [n_rows, d] = dims(&matrix);
        let mut out = Buffer::take(n_rows * d);
        let chunk = 8 * rows_at_a_time(d) * d;
        out.par_chunks_mut(chunk).zip(values(&matrix).par_chunks(chunk)).for_each(|(out, from)| out.copy_from_slice(from));
        for (id, row) in indices(&ids).into_iter().zip(values(&rows).chunks_exact(d)) {
            out[id * d..(id + 1) * d].iter_mut().zip(row).for_each(|(o, x)| *o += x);
        }
        out.into_tensor([n_rows, d])
    }
}
