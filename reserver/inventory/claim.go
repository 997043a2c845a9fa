package inventory

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/google/uuid"
)

// Outcome is the answer to one claim.
type Outcome int

// The outcomes. SoldOut is final unless a confirmed reservation is refunded; AllHeld and Busy may change.
const (
	OutcomeHeld      Outcome = iota + 1 // a new reservation
	OutcomeReplay                       // the buyer's live reservation, granted before
	OutcomeSoldOut                      // fewer units than asked for are available or held
	OutcomeAllHeld                      // not enough available, but holds may lapse
	OutcomeBusy                         // units are there, but locked by others for too long
	OutcomeLimit                        // maxPerBuyer
	OutcomeNotOpen                      // before the start
	OutcomeSuspended                    // the sale is suspended
	OutcomeClosed                       // at or after the end
)

// Request asks for Quantity units (1..MaxQuantity, all or nothing) for Buyer (1..MaxIDLength bytes).
type Request struct {
	Buyer    string
	Quantity int
}

// Result is the answer to one Request.
type Result struct {
	Outcome     Outcome
	Reservation *Reservation // of OutcomeHeld and OutcomeReplay
	AlreadySold int          // of OutcomeLimit: units the buyer bought before
}

// Line is one queue of claims. Its calls to Claim must not overlap; any number of lines, in any number of processes,
// may claim from one sale.
type Line struct {
	name         string
	next         int64     // where to look for fresh units; 0 before the first claim
	missingSince time.Time // since when units are available that the line does not find
}

// NewLine makes a line. The name must be unique among the running lines of the sale; its tally row carries it.
func NewLine(name string) *Line { return &Line{name: name} }

const (
	claimPatience = time.Second            // how long Claim tries to get units that others have locked
	rescanAfter   = 250 * time.Millisecond // how long units must be missing before a line looks for them behind its start
	scanRows      = 20_000                 // rows that one scan for fresh units walks at most
	scans         = 8                      // such scans in one transaction
	sweepInClaim  = 1000                   // expired holds given back by a claim that finds nothing else
)

// Claim answers requests in one transaction, in their order: as many units as they ask for together are taken with
// SKIP LOCKED, written with multi-row statements, committed once. Held is only answered once its commit has returned.
//
// Requests of one buyer get one reservation. A short shelf is final only when the exact counts say so: units locked
// by transactions that may roll back are waited for (up to a second, then OutcomeBusy), expired holds are taken back.
// An error leaves the outcome of every request unknown to the caller; asking again gives the same reservation.
func (s *Store) Claim(ctx context.Context, sale uuid.UUID, line *Line, requests []Request) ([]Result, error) {
	results := make([]Result, len(requests))
	pending := make([]int, len(requests)) // indexes of the requests without a final answer
	for i := range pending {
		pending[i] = i
	}
	giveUp := time.Now().Add(claimPatience)
	conflicts, rounds := 0, 0
	for {
		batch := make([]Request, len(pending))
		for i, p := range pending {
			batch[i] = requests[p]
		}
		c := claim{store: s, sale: sale, line: line, requests: batch, results: make([]Result, len(batch))}
		err := c.run(ctx)
		switch {
		case err == nil:
		case Classify(err) == Conflict && conflicts < 10:
			conflicts++
			if !pause(ctx, conflicts) {
				return nil, ctx.Err()
			}
			continue
		default:
			return nil, err
		}
		for i, p := range pending {
			results[p] = c.results[i]
		}
		if len(c.lapsed) > 0 {
			if err := s.expire(ctx, sale, line.name, c.lapsed); err != nil {
				return nil, err
			}
			continue
		}
		short := func(i int) bool {
			o := results[i].Outcome
			return o == OutcomeBusy || c.overdue && (o == OutcomeAllHeld || o == OutcomeSoldOut)
		}
		pending = slices.DeleteFunc(pending, func(i int) bool { return !short(i) })
		if len(pending) == 0 || time.Now().After(giveUp) {
			return results, nil
		}
		if c.overdue {
			if _, err := s.Sweep(ctx, sale, line.name, sweepInClaim); err != nil {
				return nil, err
			}
		}
		rounds++
		if !pause(ctx, min(rounds, 4)) {
			return results, nil // Busy, for those without units
		}
	}
}

// pause waits a few milliseconds with jitter, longer with each round; false if the context ends first.
func pause(ctx context.Context, round int) bool {
	d := time.Duration(round) * time.Millisecond
	t := time.NewTimer(d + rand.N(2*d))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// claim is one attempt at a batch.
type claim struct {
	store    *Store
	sale     uuid.UUID
	line     *Line
	requests []Request
	results  []Result

	overdue bool            // expired holds stand on the shelf, so that "short" is not the last word
	lapsed  []uuid.UUID     // expired holds of the batch's own buyers: take them back, then try again
	buyers  map[string]*buy // what the batch's buyers have
	next    int64           // the line's new start, if the attempt commits
}

// buy is a row of flashsale_buyer.
type buy struct {
	exists bool
	sold   int
	live   *Reservation
	lapsed *Reservation // still held, and past its time
}

// run fills results, or leaves lapsed filled and nothing changed.
func (c *claim) run(ctx context.Context) error {
	var granted []*Reservation
	err := c.store.inTx(ctx, func(tx *sql.Tx) error {
		window, err := c.readWindow(ctx, tx)
		if err != nil {
			return err
		}
		if window.Gate(window.Now) == GateNotOpen { // nobody holds anything yet
			c.refuseAll(GateNotOpen)
			return nil
		}
		if err := c.readBuyers(ctx, tx); err != nil || len(c.lapsed) > 0 {
			return err
		}
		wanted := c.answerWithoutUnits(window.MaxPerBuyer)
		if gate := window.Gate(window.Now); gate != GateOpen {
			c.refuseAll(gate)
			return nil
		}
		if wanted == 0 {
			return nil
		}
		returned, fresh, now, err := c.lockUnits(ctx, tx, wanted, window.Units)
		if err != nil {
			return err
		}
		if now.IsZero() {
			now = window.Now
		}
		// The row locks waited for may have cost time: the grant counts from the scan that locked the units, which waits
		// for nobody.
		if gate := window.Gate(now); gate != GateOpen {
			c.refuseAll(gate)
			return nil
		}
		found := len(returned) + len(fresh)
		free := Counts{Available: int64(found)}
		if found == wanted {
			c.line.missingSince = time.Time{}
		} else {
			snap, err := readSnapshot(ctx, tx, c.sale)
			if err != nil {
				return err
			}
			free = snap.Counts
			free.Available += snap.Units - snap.Loaded // not there yet, but not sold out either
			c.overdue = !snap.NextLapse.IsZero() && !snap.NextLapse.After(snap.Now)
			c.lookBehind(snap, int64(found))
		}
		granted = c.assign(append(slices.Clone(returned), fresh...), free, now, window.HoldTTL)
		if len(granted) == 0 {
			return nil
		}
		return c.write(ctx, tx, granted, returned)
	})
	var commit *CommitError
	if errors.As(err, &commit) && len(granted) > 0 {
		err = c.lookUp(ctx, granted, commit)
	}
	if err == nil && c.next > 0 {
		c.line.next = c.next
	}
	return err
}

// refuseAll says that the gate is shut, to all but those who hold a reservation.
func (c *claim) refuseAll(gate Gate) {
	outcome := map[Gate]Outcome{GateNotOpen: OutcomeNotOpen, GateSuspended: OutcomeSuspended, GateClosed: OutcomeClosed}[gate]
	for i := range c.results {
		if c.results[i].Outcome != OutcomeReplay {
			c.results[i] = Result{Outcome: outcome}
		}
	}
}

// lookBehind makes the line's next claim begin at the first unit again, when units have been available for a while that
// it does not find: a rollback, or a process that died, left them behind its start. Before, they may just be locked.
func (c *claim) lookBehind(snap *Snapshot, found int64) {
	switch {
	case c.next <= snap.Loaded: // there is more to look at ahead
	case snap.Available <= found:
		c.line.missingSince = time.Time{}
	case c.line.missingSince.IsZero():
		c.line.missingSince = time.Now()
	case time.Since(c.line.missingSince) > rescanAfter:
		c.next, c.line.next, c.line.missingSince = 0, 1, time.Time{}
	}
}

// readWindow reads the sale's row and shares it until the commit, so that Register and CloseSale wait for this claim.
// It carries no counts.
func (c *claim) readWindow(ctx context.Context, tx *sql.Tx) (*Snapshot, error) {
	w := &Snapshot{Sale: Sale{ID: c.sale}}
	var ends, loadedAt, closedAt sql.NullTime
	var ttl int64
	err := tx.QueryRowContext(ctx, `SELECT units, starts_at, ends_at, hold_ttl_us, max_per_buyer, suspended, draining, loaded_at, closed_at, UTC_TIMESTAMP(6)
		FROM flashsale_sale WHERE sale_id = ? LOCK IN SHARE MODE`, id(c.sale)).
		Scan(&w.Units, &w.StartsAt, &ends, &ttl, &w.MaxPerBuyer, &w.Suspended, &w.Draining, &loadedAt, &closedAt, &w.Now)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, ErrNoSale
	}
	if err != nil {
		return nil, fmt.Errorf("reading the sale's window: %w", err)
	}
	w.EndsAt, w.LoadedAt, w.ClosedAt = ends.Time, loadedAt.Time, closedAt.Time
	w.HoldTTL = time.Duration(ttl) * time.Microsecond
	return w, nil
}

// readBuyers locks the rows of the batch's buyers, so that a buyer's claims and confirmations take turns.
func (c *claim) readBuyers(ctx context.Context, tx *sql.Tx) error {
	names := make([]string, 0, len(c.requests))
	for _, r := range c.requests {
		names = append(names, r.Buyer)
	}
	buyers, err := readBuyers(ctx, tx, c.sale, names, " FOR UPDATE")
	if err != nil {
		return err
	}
	c.buyers = buyers
	for _, b := range buyers {
		if b.lapsed != nil {
			c.lapsed = append(c.lapsed, b.lapsed.ID)
		}
	}
	return nil
}

func readBuyers(ctx context.Context, q queryer, sale uuid.UUID, names []string, lock string) (map[string]*buy, error) {
	slices.Sort(names) // one order of locks for all batches
	names = slices.Compact(names)
	args := make([]any, 0, 1+len(names))
	args = append(args, id(sale))
	for _, n := range names {
		args = append(args, []byte(n))
	}
	rows, err := q.QueryContext(ctx, `SELECT buyer, held, sold, reservation_id, granted_at, expires_at, UTC_TIMESTAMP(6) FROM flashsale_buyer
		WHERE sale_id = ? AND buyer IN (`+placeholders(len(names))+`) ORDER BY buyer`+lock, args...)
	if err != nil {
		return nil, fmt.Errorf("reading the buyers: %w", err)
	}
	defer func() { _ = rows.Close() }()
	buyers := make(map[string]*buy, len(names))
	for _, n := range names {
		buyers[n] = &buy{}
	}
	for rows.Next() {
		var name, rid []byte
		var held, sold int
		var granted, expires sql.NullTime
		var now time.Time
		if err := rows.Scan(&name, &held, &sold, &rid, &granted, &expires, &now); err != nil {
			return nil, fmt.Errorf("reading the buyers: %w", err)
		}
		b := buyers[string(name)]
		b.exists, b.sold = true, sold
		if rid != nil {
			b.live = &Reservation{ID: uuid.UUID(rid), Buyer: string(name), Quantity: held, State: Held, GrantedAt: granted.Time, ExpiresAt: expires.Time}
			if !expires.Time.After(now) {
				b.live, b.lapsed = nil, b.live
			}
		}
	}
	return buyers, rows.Err()
}

// LookUp answers what can be answered without units: replays and limits. The others get no Outcome. It takes no lock,
// and serves buyers who press again when memory already knows that the shelf is empty.
func (s *Store) LookUp(ctx context.Context, sale uuid.UUID, maxPerBuyer int, requests []Request) ([]Result, error) {
	c := claim{sale: sale, requests: requests, results: make([]Result, len(requests))}
	names := make([]string, 0, len(requests))
	for _, r := range requests {
		names = append(names, r.Buyer)
	}
	var err error
	if c.buyers, err = readBuyers(ctx, s.db, sale, names, ""); err != nil {
		return nil, err
	}
	c.answerWithoutUnits(maxPerBuyer)
	return c.results, nil
}

// answerWithoutUnits answers replays and limits, and gives how many units the other requests ask for together.
// A buyer's second request in the batch waits for the first one's answer.
func (c *claim) answerWithoutUnits(maxPerBuyer int) (wanted int) {
	seen := make(map[string]bool, len(c.requests))
	for i, r := range c.requests {
		b := c.buyers[r.Buyer]
		switch {
		case b.live != nil:
			c.results[i] = Result{Outcome: OutcomeReplay, Reservation: b.live}
		case b.sold+r.Quantity > maxPerBuyer:
			c.results[i] = Result{Outcome: OutcomeLimit, AlreadySold: b.sold}
		case !seen[r.Buyer]:
			seen[r.Buyer] = true
			wanted += r.Quantity
		}
	}
	return wanted
}

// ReturnedUnitsSQL and FreshUnitsSQL are the claim's two scans. Each is served in order by the primary key it locks:
// no filesort, one record lock per unit.
const (
	ReturnedUnitsSQL = `SELECT unit_no, UTC_TIMESTAMP(6) FROM flashsale_returned
		WHERE sale_id = ? ORDER BY unit_no LIMIT ? FOR UPDATE SKIP LOCKED`
	FreshUnitsSQL = `SELECT unit_no, UTC_TIMESTAMP(6) FROM flashsale_unit
		WHERE sale_id = ? AND unit_no >= ? AND unit_no < ? AND state = 0 ORDER BY unit_no LIMIT ? FOR UPDATE SKIP LOCKED`
)

// lockUnits locks up to wanted available units of the sale's last ones, and gives the database's time at the beginning of
// the last scan that found some.
func (c *claim) lockUnits(ctx context.Context, tx *sql.Tx, wanted int, last int64) (returned, fresh []int64, now time.Time, err error) {
	lock := func(query string, args ...any) ([]int64, error) {
		rows, err := tx.QueryContext(ctx, query, args...)
		if err != nil {
			return nil, fmt.Errorf("locking units: %w", err)
		}
		defer func() { _ = rows.Close() }()
		var units []int64
		for rows.Next() {
			var unit int64
			if err := rows.Scan(&unit, &now); err != nil {
				return nil, fmt.Errorf("locking units: %w", err)
			}
			units = append(units, unit)
		}
		return units, rows.Err()
	}
	if returned, err = lock(ReturnedUnitsSQL, id(c.sale), wanted); err != nil {
		return nil, nil, now, err
	}
	if len(returned) == wanted {
		return returned, nil, now, nil
	}
	if c.line.next == 0 {
		if err := c.findStart(ctx, tx); err != nil {
			return nil, nil, now, err
		}
	}
	// In slices: a line that was idle for long has many taken units to walk past, and must not do it in one go.
	c.next = c.line.next
	for range scans {
		missing := wanted - len(returned) - len(fresh)
		if missing == 0 || c.next > last {
			break
		}
		end := min(c.next+scanRows, last+1)
		found, err := lock(FreshUnitsSQL, id(c.sale), c.next, end, missing)
		if err != nil {
			return nil, nil, now, err
		}
		fresh = append(fresh, found...)
		if len(found) == missing {
			c.next = found[missing-1] + 1
			break
		}
		c.next = end
		if len(fresh) == 0 {
			c.line.next = end // nothing is here, whatever becomes of this transaction
		}
	}
	return returned, fresh, now, nil
}

// findStart gives a new line the start of those before it. Fresh units left behind it, by a process that died, are
// found by the rescan.
func (c *claim) findStart(ctx context.Context, tx *sql.Tx) error {
	err := tx.QueryRowContext(ctx, "SELECT COALESCE(MAX(next_unit), 1) FROM flashsale_tally WHERE sale_id = ?", id(c.sale)).Scan(&c.line.next)
	if err != nil {
		return fmt.Errorf("reading where fresh units begin: %w", err)
	}
	return nil
}

// assign gives the units to the unanswered requests, in order, and says of the others why not. free are the exact
// counts: units available but not among those locked here are locked by others, who may roll back.
func (c *claim) assign(units []int64, free Counts, now time.Time, ttl time.Duration) []*Reservation {
	var granted []*Reservation
	elsewhere := max(free.Available-int64(len(units)), 0)
	held := free.Held
	for i, r := range c.requests {
		if c.results[i].Outcome != 0 {
			continue
		}
		b := c.buyers[r.Buyer]
		k, left := int64(r.Quantity), int64(len(units))
		switch {
		case b.live != nil: // granted to the same buyer a moment ago, in this batch
			c.results[i] = Result{Outcome: OutcomeReplay, Reservation: b.live}
		case k <= left:
			res := &Reservation{ID: uuid.Must(uuid.NewV7()), Buyer: r.Buyer, Quantity: r.Quantity, Units: units[:k:k], State: Held,
				GrantedAt: now, ExpiresAt: now.Add(ttl)}
			units, held = units[k:], held+k
			b.live = res
			granted = append(granted, res)
			c.results[i] = Result{Outcome: OutcomeHeld, Reservation: res}
		case k <= left+elsewhere:
			c.results[i] = Result{Outcome: OutcomeBusy}
		case k <= left+elsewhere+held:
			c.results[i] = Result{Outcome: OutcomeAllHeld}
		default:
			c.results[i] = Result{Outcome: OutcomeSoldOut}
		}
	}
	return granted
}

// write moves the granted units and records who has them.
func (c *claim) write(ctx context.Context, tx *sql.Tx, granted []*Reservation, returned []int64) error {
	sale := id(c.sale)
	var unitArgs, reservationArgs, newBuyerArgs, returnedArgs []any
	newBuyers := 0
	isReturned := make(map[int64]bool, len(returned))
	for _, u := range returned {
		isReturned[u] = true
	}
	returnedArgs = append(returnedArgs, sale)
	units := 0
	for _, r := range granted {
		reservationArgs = append(reservationArgs, sale, id(r.ID), []byte(r.Buyer), r.Quantity, joinUnits(r.Units), Held, r.GrantedAt, r.ExpiresAt, r.ExpiresAt)
		for _, u := range r.Units {
			unitArgs = append(unitArgs, sale, u, unitHeld, id(r.ID))
			units++
			if isReturned[u] {
				returnedArgs = append(returnedArgs, u)
			}
		}
	}
	// New buyers are inserted plainly: a duplicate key means that another pod served the buyer first, and the attempt
	// starts again. Sorted, so that two batches with common buyers wait for, and do not deadlock with, each other.
	byBuyer := slices.Clone(granted)
	slices.SortFunc(byBuyer, func(a, b *Reservation) int {
		if a.Buyer < b.Buyer {
			return -1
		}
		return 1
	})
	for _, r := range byBuyer {
		if !c.buyers[r.Buyer].exists {
			newBuyers++
			newBuyerArgs = append(newBuyerArgs, sale, []byte(r.Buyer), r.Quantity, id(r.ID), r.GrantedAt, r.ExpiresAt)
			continue
		}
		err := exec(ctx, tx, 1, "recording the buyer's hold", `UPDATE flashsale_buyer SET held = ?, reservation_id = ?, granted_at = ?, expires_at = ?
			WHERE sale_id = ? AND buyer = ? AND reservation_id IS NULL`, r.Quantity, id(r.ID), r.GrantedAt, r.ExpiresAt, sale, []byte(r.Buyer))
		if err != nil {
			return err
		}
	}
	if newBuyers > 0 {
		err := exec(ctx, tx, newBuyers, "recording buyers", `INSERT INTO flashsale_buyer (sale_id, buyer, held, reservation_id, granted_at, expires_at)
			VALUES `+rowPlaceholders("(?,?,?,?,?,?)", newBuyers), newBuyerArgs...)
		if err != nil {
			return err
		}
	}
	if n := len(returnedArgs) - 1; n > 0 {
		err := exec(ctx, tx, n, "taking returned units", "DELETE FROM flashsale_returned WHERE sale_id = ? AND unit_no IN ("+placeholders(n)+")", returnedArgs...)
		if err != nil {
			return err
		}
	}
	// Every row is there and locked, so this updates; MySQL counts an updated row as two.
	err := exec(ctx, tx, 2*units, "marking units held", `INSERT INTO flashsale_unit (sale_id, unit_no, state, reservation_id)
		VALUES `+rowPlaceholders("(?,?,?,?)", units)+` ON DUPLICATE KEY UPDATE state = VALUES(state), reservation_id = VALUES(reservation_id)`, unitArgs...)
	if err != nil {
		return err
	}
	err = exec(ctx, tx, len(granted), "recording reservations", `INSERT INTO flashsale_reservation
		(sale_id, reservation_id, buyer, quantity, unit_nos, state, granted_at, expires_at, lapses_at)
		VALUES `+rowPlaceholders("(?,?,?,?,?,?,?,?,?)", len(granted)), reservationArgs...)
	if err != nil {
		return err
	}
	return tally(ctx, tx, c.sale, c.line.name, Counts{Available: -int64(units), Held: int64(units)}, c.next)
}

// lookUp finds out whether a commit whose connection broke took effect. The locking read waits for the transaction's
// own locks to go, so its answer is final.
func (c *claim) lookUp(ctx context.Context, granted []*Reservation, commit *CommitError) error {
	var quantity int
	err := c.store.db.QueryRowContext(ctx, "SELECT quantity FROM flashsale_reservation WHERE sale_id = ? AND reservation_id = ? LOCK IN SHARE MODE",
		id(c.sale), id(granted[0].ID)).Scan(&quantity)
	if err != nil { // not there, or not to be known now
		return commit
	}
	return nil
}

// tally adds to a line's counts.
func tally(ctx context.Context, tx *sql.Tx, sale uuid.UUID, line string, change Counts, next int64) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO flashsale_tally (sale_id, line, available, held, sold, next_unit) VALUES (?,?,?,?,?,?)
		ON DUPLICATE KEY UPDATE available = available + VALUES(available), held = held + VALUES(held), sold = sold + VALUES(sold),
		next_unit = GREATEST(next_unit, VALUES(next_unit))`, id(sale), line, change.Available, change.Held, change.Sold, max(next, 1))
	if err != nil {
		return fmt.Errorf("counting: %w", err)
	}
	return nil
}

// exec runs a statement that must change exactly want rows; any other number means that the rows contradict what was
// read under lock, and the transaction must not commit.
func exec(ctx context.Context, tx *sql.Tx, want int, doing, query string, args ...any) error {
	r, err := tx.ExecContext(ctx, query, args...)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	if n, err := r.RowsAffected(); err != nil || n != int64(want) {
		return fmt.Errorf("%s: %d rows instead of %d: %w", doing, n, want, ErrCorrupt)
	}
	return nil
}
