//! The small dense decompositions of merging, in f64, and the best approximation of a rank in Frobenius norm.

use nalgebra::{DMatrix, DVector, SVD};
use weact_core::{
    adapter::PlainFactors,
    ops::{PlainMatrix, gram, product},
};

use super::mask::Stream;

/// A merged update at the rank of the result.
#[derive(Clone, Debug)]
pub(super) struct Compressed {
    /// Of scale 1.
    pub(super) factors: PlainFactors,
    /// The share of the squared Frobenius norm that the result keeps; 1 for an update of zeros.
    pub(super) kept: f64,
    /// The last singular value that is kept over the first that is not: where it is near 1, the result is hardly unique.
    pub(super) gap: Option<f64>,
    /// How it was computed.
    pub(super) how: How,
}

/// How an update came to its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    /// Factors of the rank hold it.
    Exact,
    /// A singular value decomposition in f64.
    Svd,
    /// Block subspace iteration on the Gram matrix of the smaller side in f32, finished on the update itself in f64.
    Subspace {
        /// Steps until the kept energy stood.
        steps: usize,
    },
}

/// Up to this many rows or columns the whole decomposition is computed.
const WHOLE: usize = 256;
/// At most so many steps; a flat spectrum needs about eight.
const MOST_STEPS: usize = 60;
/// The iteration ends when two steps change the kept energy by less than this share.
const STANDS: f64 = 1e-5;

/// The best approximation of rank `rank` of a row-major `[d_out, d_in]` update. Where it is iterated, the start is drawn from
/// `stream`.
pub(super) fn truncate_dense(update: &[f32], (d_out, d_in): (usize, usize), rank: usize, stream: Stream) -> Compressed {
    let total: f64 = update.iter().map(|x| f64::from(*x).powi(2)).sum();
    if total == 0.0 {
        let factors = PlainFactors { a: vec![0.0; d_in * rank], b: vec![0.0; rank * d_out], d_in, rank, d_out };
        return Compressed { factors, kept: 1.0, gap: None, how: How::Exact };
    }
    let smaller = d_out.min(d_in);
    if smaller <= WHOLE || 2 * rank >= smaller {
        let dense = DMatrix::from_row_iterator(d_out, d_in, update.iter().map(|x| f64::from(*x)));
        return truncate_svd(&svd(dense), rank, total, How::Svd);
    }
    let plain = PlainMatrix::new(update, d_out, d_in);
    let (tall, wide) = if d_out >= d_in { (plain, plain.transposed()) } else { (plain.transposed(), plain) };
    let n_cols = 2 * rank;
    let gram = gram(tall); // [smaller, smaller]
    let start = (0..smaller * n_cols).map(|i| (stream.bits(i as u64) >> 11) as f64 / (1_u64 << 53) as f64 - 0.5);
    let mut basis = orthonormal(DMatrix::from_iterator(smaller, n_cols, start), 2).expect("random columns are independent");
    let (mut energy, mut steps) = (0.0, 0);
    loop {
        let image = times(PlainMatrix::new(&gram, smaller, smaller), &basis);
        steps += 1;
        if steps % 2 == 0 {
            let now = top_energy(&gram_of(&basis, &image), rank);
            if (now - energy).abs() <= STANDS * now || steps >= MOST_STEPS {
                break;
            }
            energy = now;
        }
        // Columns that have become dependent carry nothing that is not in the others: the basis before them serves.
        match orthonormal(image, 1) {
            Some(next) => basis = next,
            None => break,
        }
    }
    // One more step on the update itself: the Gram matrix squares what f32 can tell apart.
    let left = match orthonormal(times(tall, &basis), 2) {
        Some(left) => left,
        None => times(tall, &basis).qr().q(),
    };
    let right = times(wide, &left).transpose(); // [n_cols, smaller]
    let small = svd_of_rows(&right);
    let small = Svd { u: &left * small.u, ..small };
    let found = if d_out >= d_in { small } else { Svd { u: small.v_t.transpose(), s: small.s, v_t: small.u.transpose() } };
    truncate_svd(&found, rank, total, How::Subspace { steps })
}

/// The best approximation of rank `rank` of `b a`, which is never formed.
///
/// # Shapes
/// - `b`: `[d_out, s]`; `a`: `[s, d_in]`
pub(super) fn truncate_low_rank(b: &DMatrix<f64>, a: &DMatrix<f64>, rank: usize) -> Compressed {
    let (left, right) = (b.clone().qr(), a.transpose().qr());
    let core = svd(left.r() * right.r().transpose());
    let total = core.s.iter().map(|s| s * s).sum();
    let whole = Svd { u: left.q() * core.u, s: core.s, v_t: core.v_t * right.q().transpose() };
    truncate_svd(&whole, rank, total, How::Svd)
}

/// A thin singular value decomposition, singular values falling.
pub(super) struct Svd {
    pub(super) u: DMatrix<f64>,
    pub(super) s: DVector<f64>,
    pub(super) v_t: DMatrix<f64>,
}

pub(super) fn svd(matrix: DMatrix<f64>) -> Svd {
    // nalgebra bidiagonalises rows first: a wide matrix takes it longer than its transpose.
    let wide = matrix.ncols() > matrix.nrows();
    let SVD { u, v_t, singular_values: s } = if wide { matrix.transpose() } else { matrix }.svd(true, true);
    let (u, v_t) = (u.expect("asked for"), v_t.expect("asked for"));
    let (u, v_t) = if wide { (v_t.transpose(), u.transpose()) } else { (u, v_t) };
    Svd { u, s, v_t }
}

/// The decomposition of a few long rows, by the eigenvectors of their Gram matrix.
fn svd_of_rows(rows: &DMatrix<f64>) -> Svd {
    let eigen = (rows * rows.transpose()).symmetric_eigen();
    let mut order: Vec<usize> = (0..rows.nrows()).collect();
    order.sort_by(|a, b| eigen.eigenvalues[*b].total_cmp(&eigen.eigenvalues[*a]));
    let u = DMatrix::from_fn(rows.nrows(), rows.nrows(), |i, j| eigen.eigenvectors[(i, order[j])]);
    let s = DVector::from_iterator(order.len(), order.iter().map(|j| eigen.eigenvalues[*j].max(0.0).sqrt()));
    let largest = s.max();
    let mut v_t = u.transpose() * rows;
    for (mut row, s) in v_t.row_iter_mut().zip(s.iter()) {
        // What is below the rounding of the Gram matrix has no direction.
        row.scale_mut(if *s > 1e-7 * largest { 1.0 / s } else { 0.0 });
    }
    Svd { u, s, v_t }
}

/// The first `rank` singular triples as factors, the roots of the singular values on both sides; zeros beyond the last.
fn truncate_svd(whole: &Svd, rank: usize, total: f64, how: How) -> Compressed {
    let (d_out, d_in) = (whole.u.nrows(), whole.v_t.ncols());
    let n = rank.min(whole.s.len());
    let root = |r: usize| if r < n { whole.s[r].max(0.0).sqrt() } else { 0.0 };
    let mut factors = PlainFactors { a: vec![0.0; d_in * rank], b: vec![0.0; rank * d_out], d_in, rank, d_out };
    for r in 0..n {
        let column = whole.u.column(r);
        // The largest entry of a left vector is positive: of the two signs, files have always the same.
        let root = root(r) * column[column.iamax()].signum();
        (0..d_in).for_each(|i| factors.a[i * rank + r] = (whole.v_t[(r, i)] * root) as f32);
        (0..d_out).for_each(|o| factors.b[r * d_out + o] = (column[o] * root) as f32);
    }
    let kept: f64 = whole.s.iter().take(n).map(|s| s * s).sum();
    let next = whole.s.get(n).copied().filter(|s| *s > 0.0);
    let kept = if total > 0.0 { (kept / total).min(1.0) } else { 1.0 };
    Compressed { factors, kept, gap: next.map(|next| whole.s[n - 1] / next), how }
}

/// `matrix columns`, the product in f32.
fn times(matrix: PlainMatrix<'_>, columns: &DMatrix<f64>) -> DMatrix<f64> {
    let (n, n_cols) = columns.shape();
    let narrow: Vec<f32> = columns.iter().map(|x| *x as f32).collect(); // column after column: the rows of the transpose
    let rows = product(matrix, PlainMatrix::new(&narrow, n_cols, n).transposed());
    DMatrix::from_row_iterator(rows.len() / n_cols, n_cols, rows.into_iter().map(f64::from))
}

/// An orthonormal basis of the columns by Cholesky steps (<https://arxiv.org/abs/1401.5171>), the columns brought to length 1 first;
/// `None` where they are not independent. Two steps make it orthonormal to rounding.
fn orthonormal(mut columns: DMatrix<f64>, n_steps: usize) -> Option<DMatrix<f64>> {
    for mut column in columns.column_iter_mut() {
        let norm = column.norm();
        if !(norm > 0.0 && norm.is_finite()) {
            return None;
        }
        column /= norm;
    }
    let n = columns.ncols();
    for _ in 0..n_steps {
        let cholesky = gram_of(&columns, &columns).cholesky()?;
        let inverse = cholesky.l_dirty().solve_lower_triangular(&DMatrix::identity(n, n))?;
        columns *= inverse.transpose();
    }
    Some(columns)
}

/// `a^T b` by the blocked product: nalgebra's own `tr_mul` takes one column with another.
fn gram_of(a: &DMatrix<f64>, b: &DMatrix<f64>) -> DMatrix<f64> {
    a.transpose() * b
}

/// The sum of the `rank` largest eigenvalues of a symmetric matrix.
fn top_energy(matrix: &DMatrix<f64>, rank: usize) -> f64 {
    let symmetric = (matrix + matrix.transpose()) / 2.0;
    let mut values: Vec<f64> = symmetric.symmetric_eigenvalues().iter().copied().collect();
    values.sort_by(|a, b| b.total_cmp(a));
    values.iter().take(rank).sum()
}

/// Row-major numbers as a matrix.
pub(super) fn matrix(values: &[f32], n_rows: usize, n_cols: usize) -> DMatrix<f64> {
    DMatrix::from_row_iterator(n_rows, n_cols, values.iter().map(|x| f64::from(*x)))
}

/// Row-major numbers of a matrix.
pub(super) fn row_major(matrix: &DMatrix<f64>) -> Vec<f32> {
    matrix.row_iter().flat_map(|row| row.iter().map(|x| *x as f32).collect::<Vec<_>>()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A seeded matrix with a flat spectrum, as trimmed updates have.
    fn noise(n_rows: usize, n_cols: usize) -> Vec<f32> {
        let stream = Stream::new(7, "noise", "noise");
        (0..n_rows * n_cols).map(|i| (stream.bits(i as u64) >> 40) as f32 / (1 << 24) as f32 - 0.5).collect()
    }

    fn error(update: &[f32], f: &PlainFactors) -> f64 {
        let b = PlainMatrix::new(&f.b, f.rank, f.d_out).transposed();
        let found = product(b, PlainMatrix::new(&f.a, f.d_in, f.rank).transposed());
        update.iter().zip(&found).map(|(x, y)| f64::from(x - y).powi(2)).sum::<f64>().sqrt()
    }

    #[test]
    fn iteration_is_within_a_thousandth_of_the_exact_truncation() {
        for (d_out, d_in) in [(320, 300), (300, 320)] {
            let mut update = noise(d_out, d_in);
            update.iter_mut().enumerate().for_each(|(i, x)| *x += 0.1 * ((i % d_in) % 7) as f32);
            let iterated = truncate_dense(&update, (d_out, d_in), 16, Stream::new(0, "", "start"));
            assert!(matches!(iterated.how, How::Subspace { .. }), "{:?}", iterated.how);
            let exact = svd(matrix(&update, d_out, d_in));
            let tail = exact.s.iter().skip(16).map(|s| s * s).sum::<f64>().sqrt();
            let found = error(&update, &iterated.factors);
            assert!(found / tail - 1.0 < 1e-4, "{found} against {tail}");
            let kept = exact.s.iter().take(16).map(|s| s * s).sum::<f64>() / exact.s.norm_squared();
            assert!((iterated.kept - kept).abs() < 1e-5, "{} against {kept}", iterated.kept);
        }
    }

    #[test]
    fn an_update_of_the_rank_or_less_is_kept_whole() {
        let (b, a) = (matrix(&noise(300, 6), 300, 6), matrix(&noise(6, 280), 6, 280));
        let update = row_major(&(&b * &a));
        let scale = update.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        for found in [truncate_dense(&update, (300, 280), 8, Stream::new(0, "", "")), truncate_low_rank(&b, &a, 8)] {
            assert!(error(&update, &found.factors) < 1e-5 * scale, "{:?} {}", found.how, error(&update, &found.factors) / scale);
            assert!((found.kept - 1.0).abs() < 1e-6, "{}", found.kept);
        }
    }

    #[test]
    fn a_rank_above_the_layers_is_padded_with_zeros() {
        let found = truncate_low_rank(&matrix(&noise(4, 9), 4, 9), &matrix(&noise(9, 5), 9, 5), 9);
        assert_eq!((found.factors.rank, found.factors.a.len(), found.factors.b.len()), (9, 45, 36));
        assert!(found.factors.b[4 * 4..].iter().all(|x| *x == 0.0));
    }
}
