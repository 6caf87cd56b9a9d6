"""Training instances that help or harm: the change of the validation loss by each removal.

Each training sample has a mask entry (tasks/influence.py, or any problem whose private x_i weights
the samples of client i, starting from ones). F(x) = sum_k f_k(y*(x)) is the validation loss summed
over clients. When x_ij goes from 1 to 0, F changes to first order by minus the derivative of F by
x_ij. The private block f_x,i - J_i u of the library's hypergradient is that derivative (n times the
block of the mean form), so one solution of (mean H) u = mean f_y serves all instances of all
clients. u comes from HGP on any network, from a server algorithm that has an `estimate`, from a
solver of oracle/hypergradient.py, or from the series of HGP at a server.

    predict     the change by each removal, from one hypergradient
    series      HGP's series at a server, in the Krylov space of a few products
    retrain     the change by some removals, from training again without the instance
    result      predictions beside actual changes, with scores
    plain       gradient products, trajectories and own losses, for comparison
    fit         fb.influence: predictions for any problem
    study       all of these steps, from a task
    record      influence.json and pictures

Reference: Terashita, Hara, "Decentralized Hyper-Gradient Computation over Time-Varying Directed
Networks", section 5.2, appendix A.2, Table 4.
"""
