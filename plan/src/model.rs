//! The linear program: rates are its variables, and the resources of the network its rows.
//!
//! The solver is microlp: it is pure Rust and builds in seconds, while HiGHS takes a C++ compiler
//! and minutes. Programs here have some hundred rows; it solves them in milliseconds.

use std::collections::{BTreeMap, BTreeSet};

use microlp::{ComparisonOp, OptimizationDirection, Problem};

use crate::topology::{Error, Network, Resource};

/// A variable's number.
pub type Var = usize;

/// Rates that share a network.
#[derive(Clone, Debug)]
pub struct Model<'a> {
    network: &'a Network,
    vars: usize,
    /// In order of variables.
    rows: BTreeMap<Resource, Vec<(Var, f64)>>,
    equal: Vec<(Var, Vec<Var>)>,
}

/// A lower bound for the sum of some variables. If it is `lifted`, the sum must exceed the bound by
/// the program's objective, which all lifted floors have in common.
#[derive(Clone, Debug)]
pub struct Floor<'a> {
    pub vars: &'a [Var],
    pub least: f64,
    pub lifted: bool,
}

impl<'a> Model<'a> {
    pub fn new(network: &'a Network) -> Self {
        Self { network, vars: 0, rows: BTreeMap::new(), equal: Vec::new() }
    }

    /// Adds a rate, with the amount of each resource that it uses.
    pub fn var(&mut self, uses: impl IntoIterator<Item = (Resource, f64)>) -> Var {
        self.vars += 1;
        for (resource, amount) in uses {
            let row = self.rows.entry(resource).or_default();
            match row.last_mut() {
                Some((var, sum)) if *var == self.vars - 1 => *sum += amount,
                _ => row.push((self.vars - 1, amount)),
            }
        }
        self.vars - 1
    }

    /// Says that a rate is the sum of others.
    pub fn parts(&mut self, whole: Var, parts: Vec<Var>) {
        self.equal.push((whole, parts));
    }

    /// The program, with the capacity of each resource; `free` has what is left of those that are
    /// partly used.
    pub fn program(&self, free: &BTreeMap<Resource, f64>) -> Program {
        // Resources with equal uses become one row.
        let mut rows: BTreeMap<Vec<(Var, u64)>, f64> = BTreeMap::new();
        let mut closed = vec![false; self.vars];
        for (resource, terms) in &self.rows {
            let room =
                free.get(resource).copied().unwrap_or_else(|| self.network.capacity(*resource));
            if room <= 0.0 {
                terms
                    .iter()
                    .filter(|(_, amount)| *amount > 0.0)
                    .for_each(|&(var, _)| closed[var] = true);
                continue;
            }
            let row = terms.iter().map(|&(var, amount)| (var, amount.to_bits())).collect();
            let least = rows.entry(row).or_insert(f64::INFINITY);
            *least = least.min(room);
        }
        let rows: Vec<(Vec<(Var, f64)>, f64)> = rows
            .into_iter()
            .map(|(row, room)| {
                (row.into_iter().map(|(var, bits)| (var, f64::from_bits(bits))).collect(), room)
            })
            .collect();
        let widest = |(row, room): &(Vec<(Var, f64)>, f64)| {
            row.iter().map(|(_, amount)| room / amount).fold(f64::INFINITY, f64::min)
        };
        let unit = rows.iter().map(widest).fold(f64::INFINITY, f64::min);
        Program { rows, closed, equal: self.equal.clone(), unit }
    }
}

/// A linear program.
#[derive(Clone, Debug)]
pub struct Program {
    rows: Vec<(Vec<(Var, f64)>, f64)>,
    /// Variables that are fixed at 0.
    closed: Vec<bool>,
    equal: Vec<(Var, Vec<Var>)>,
    /// Rates are divided by this, which keeps the solver's numbers near 1.
    unit: f64,
}

impl Program {
    /// Maximises the common excess of the lifted floors. Returns it and all variables.
    ///
    /// # Errors
    /// If the solver fails.
    pub fn solve(&self, floors: &[Floor]) -> Result<(f64, Vec<f64>), Error> {
        let unit = self.unit;
        if unit == f64::INFINITY {
            // All variables are fixed at 0.
            return Ok((0.0, vec![0.0; self.closed.len()]));
        }
        let mut problem = Problem::new(OptimizationDirection::Maximize);
        let most = |closed: &bool| if *closed { 0.0 } else { f64::INFINITY };
        let vars: Vec<_> =
            self.closed.iter().map(|closed| problem.add_var(0.0, (0.0, most(closed)))).collect();
        let lift = problem.add_var(1.0, (0.0, f64::INFINITY));
        for (row, room) in &self.rows {
            let terms: Vec<_> =
                row.iter().map(|&(var, amount)| (vars[var], amount * unit / room)).collect();
            problem.add_constraint(&terms[..], ComparisonOp::Le, 1.0);
        }
        for (whole, parts) in &self.equal {
            let terms: Vec<_> =
                parts.iter().map(|&part| (vars[part], 1.0)).chain([(vars[*whole], -1.0)]).collect();
            problem.add_constraint(&terms[..], ComparisonOp::Eq, 0.0);
        }
        for floor in floors {
            let mut terms: Vec<_> = floor.vars.iter().map(|&var| (vars[var], 1.0)).collect();
            if floor.lifted {
                terms.push((lift, -1.0));
            }
            // A known optimum that is required again must not fail by its last digit.
            problem.add_constraint(
                &terms[..],
                ComparisonOp::Ge,
                floor.least / unit * (1.0 - 1e-9) - 1e-9,
            );
        }
        let solution = problem.solve().map_err(|e| Error::Solver(e.to_string()))?;
        Ok((solution[lift] * unit, vars.iter().map(|&var| solution[var].max(0.0) * unit).collect()))
    }

    /// The variables that cannot grow while all others keep their value in a solution, and those
    /// that are fixed.
    pub fn stopped(&self, solution: &[f64]) -> BTreeSet<Var> {
        let is_full = |(row, room): &&(Vec<(Var, f64)>, f64)| {
            row.iter().map(|&(var, amount)| amount * solution[var]).sum::<f64>()
                > room * (1.0 - 1e-6)
        };
        let full = self.rows.iter().filter(is_full).flat_map(|(row, _)| row).map(|(var, _)| *var);
        let tied =
            self.equal.iter().flat_map(|(whole, parts)| parts.iter().chain([whole])).copied();
        full.chain(tied).chain((0..self.closed.len()).filter(|&var| self.closed[var])).collect()
    }

    /// The largest sum of some variables, with all others 0.
    ///
    /// # Errors
    /// If the solver fails.
    pub fn max_sum(&self, vars: &[Var]) -> Result<(f64, Vec<f64>), Error> {
        let closed =
            (0..self.closed.len()).map(|var| self.closed[var] || !vars.contains(&var)).collect();
        let rows = self.rows.iter().map(|(row, room)| {
            (row.iter().filter(|(var, _)| vars.contains(var)).copied().collect::<Vec<_>>(), *room)
        });
        let rows = rows.filter(|(row, _)| !row.is_empty()).collect();
        Self { rows, closed, equal: Vec::new(), unit: self.unit }.solve(&[Floor {
            vars,
            least: 0.0,
            lifted: true,
        }])
    }
}
