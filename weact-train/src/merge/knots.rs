//! KnOTS (<https://arxiv.org/abs/2410.19735>): the updates of a module written in one basis, so that merging entry by entry compares
//! like with like.
//!
//! With `[dW_1 | ... | dW_N] = U S [V_1 | ... | V_N]^T` the coordinates of source `i` are `X_i = S V_i^T`, and `dW_i = U X_i` exactly.
//! The stack of `d_out x N d_in` is never formed: its decomposition is that of a core of the sources' ranks. The authors' code merges
//! `B A` without the adapters' scales; here they are in `B`.

use nalgebra::DMatrix;

use super::decompose::svd;

/// Coordinates of a module's updates in their common basis.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    /// `U`, `[d_out, c]`, orthonormal columns.
    pub(super) basis: DMatrix<f64>,
    /// `X_i`, `[c, d_in]`, one a source.
    pub(super) coordinates: Vec<DMatrix<f64>>,
}

/// Singular values below this are no direction (the authors' bound).
const SMALLEST: f64 = 1e-5;

/// The common basis of the updates `b_i a_i`.
///
/// # Shapes
/// - `b_i`: `[d_out, r_i]`, with scales; `a_i`: `[r_i, d_in]`
pub(super) fn shared(sources: &[(DMatrix<f64>, DMatrix<f64>)]) -> Shared {
    let d_out = sources[0].0.nrows();
    let total: usize = sources.iter().map(|(b, _)| b.ncols()).sum();
    let mut stacked = DMatrix::zeros(d_out, total);
    let mut first = 0;
    for (b, _) in sources {
        stacked.columns_mut(first, b.ncols()).copy_from(b);
        first += b.ncols();
    }
    let left = stacked.qr();
    let (q, r) = (left.q(), left.r()); // [d_out, k], [k, total]
    let rights: Vec<_> = sources.iter().map(|(_, a)| a.transpose().qr()).collect();
    let mut blocks: Vec<DMatrix<f64>> = Vec::with_capacity(sources.len());
    let mut first = 0;
    for ((b, _), right) in sources.iter().zip(&rights) {
        blocks.push(r.columns(first, b.ncols()) * right.r().transpose()); // [k, min(d_in, r_i)]
        first += b.ncols();
    }
    let width = blocks.iter().map(DMatrix::ncols).sum();
    let mut core = DMatrix::zeros(q.ncols(), width);
    let mut first = 0;
    for block in &blocks {
        core.columns_mut(first, block.ncols()).copy_from(block);
        first += block.ncols();
    }
    let core = svd(core);
    let n = core.s.iter().filter(|s| **s > SMALLEST).count();
    let mut first = 0;
    let mut coordinates = Vec::with_capacity(sources.len());
    for (block, right) in blocks.iter().zip(&rights) {
        let mut part = core.v_t.view((0, first), (n, block.ncols())).into_owned();
        part.row_iter_mut().zip(core.s.iter()).for_each(|(mut row, s)| row *= *s);
        coordinates.push(part * right.q().transpose());
        first += block.ncols();
    }
    Shared { basis: q * core.u.columns(0, n), coordinates }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coordinates_hold_each_update_exactly() {
        let fill = |n, m, k: f64| DMatrix::from_fn(n, m, |i, j| ((i * 7 + j * 3) as f64 * k).sin());
        let sources =
            [(fill(9, 2, 0.3), fill(2, 6, 1.1)), (fill(9, 3, 0.7), fill(3, 6, 0.9)), (fill(9, 4, 1.3), fill(4, 6, 0.2))];
        let shared = shared(&sources);
        let gram = shared.basis.tr_mul(&shared.basis);
        assert!((&gram - DMatrix::identity(gram.nrows(), gram.nrows())).amax() < 1e-12);
        for ((b, a), x) in sources.iter().zip(&shared.coordinates) {
            assert!((b * a - &shared.basis * x).amax() < 1e-5 * (b * a).amax());
        }
    }
}
