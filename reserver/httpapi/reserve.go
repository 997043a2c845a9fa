package httpapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"flashsale.dev/operator/reserver/admission"
	"flashsale.dev/operator/reserver/inventory"
)

// reserve answers POST /v1/reservations.
func (s *Server) reserve(w http.ResponseWriter, r *http.Request, c *admission.Caller) string {
	name := c.Buyer
	if name == "" {
		return unauthenticated(w, problemUnauthenticated)
	}
	quantity := 0
	key, p := idempotencyKey(r)
	if p == nil {
		quantity, p = decodeQuantity(w, r)
	}
	if p != nil {
		return refuse(w, p)
	}
	// Most of a crowd is told so, from bytes that were written when the sale was looked at last.
	if no := s.ready.Load().refuse(quantity); no != nil && !s.watch.Buyers.MayHave(name) {
		return no.write(w)
	}
	ctx, cancel := context.WithTimeout(r.Context(), answerLimit)
	defer cancel()
	if s.test != nil && s.watch.View().Judge(time.Now(), quantity) != inventory.OutcomeNotOpen {
		switch err := s.test.Check(ctx, r.Header.Get("Challenge-Solution"), c); {
		case errors.Is(err, admission.ErrChallenge):
			return refuse(w, problemChallenge)
		case err != nil:
			return s.fail(w, r, "check a challenge", err)
		}
	}
	result, err := s.ask(ctx, inventory.Request{Buyer: name, Quantity: quantity, Key: key})
	if err != nil {
		return s.fail(w, r, "reserve", err)
	}
	if result.Reservation != nil {
		w.Header().Set("Location", "/v1/reservations/"+result.Reservation.ID.String())
		if result.Outcome == inventory.OutcomeReplay {
			s.writeReservation(w, http.StatusOK, result.Reservation)
			return "replay"
		}
		return s.writeReservation(w, http.StatusCreated, result.Reservation)
	}
	return refuse(w, refusal(s.watch.View(), result, quantity))
}

// challenge answers GET /v1/challenge.
func (s *Server) challenge(w http.ResponseWriter, _ *http.Request, c *admission.Caller) string {
	work, ok := s.test.(*admission.ProofOfWork)
	switch {
	case !ok:
		return refuse(w, problemNotFound)
	case c.Buyer == "":
		return unauthenticated(w, problemUnauthenticated)
	}
	writeJSON(w, http.StatusOK, work.New(c.Buyer, time.Now()))
	return "challenge"
}

// ask gives the answer to a claim: from memory where that may say no, else from the database. A buyer who has a
// reservation is told of it even when memory knows that the shelf is empty.
func (s *Server) ask(ctx context.Context, request inventory.Request) (inventory.Result, error) {
	no := s.watch.View().Judge(time.Now(), request.Quantity)
	switch no {
	case 0:
		return s.claims.Ask(ctx, request)
	case inventory.OutcomeNotOpen:
		return inventory.Result{Outcome: no}, nil
	}
	result, err := s.lookUp.Ask(ctx, request)
	if err == nil && result.Outcome == 0 && result.Reservation != nil {
		return s.claims.Ask(ctx, request) // which also stores the key
	}
	shut := no == inventory.OutcomeClosed || no == inventory.OutcomeSuspended
	if err == nil && (result.Outcome == 0 || shut && result.Outcome == inventory.OutcomeLimit) {
		result.Outcome = no
	}
	return result, err
}

// refusal says why there is no reservation, and when to ask again.
func refusal(v *admission.View, result inventory.Result, quantity int) *Problem {
	if v == nil {
		return problemUnavailable
	}
	earliest, _ := v.Bounds(time.Now())
	untilNext := max(v.NextLapse.Sub(earliest), time.Second)
	counts := map[string]any{"available": v.Available, "held": v.Held, "sold": v.Sold}
	switch result.Outcome {
	case inventory.OutcomeSoldOut:
		detail := "Every unit is sold."
		if v.Available+v.Held > 0 {
			detail = fmt.Sprintf("Fewer than %d units are left.", quantity)
		}
		return &Problem{Slug: "sold-out", Title: "Sold out", Status: http.StatusConflict, Detail: detail, Extra: counts}
	case inventory.OutcomeAllHeld:
		if !v.NextLapse.IsZero() {
			counts["nextExpiry"] = v.NextLapse
		} else {
			untilNext = time.Second
		}
		return &Problem{Slug: "all-held", Title: "All units are held", Status: http.StatusConflict, RetryAfter: untilNext, Extra: counts,
			Detail: "Holds that are not paid in time come back."}
	case inventory.OutcomeLimit:
		return &Problem{Slug: "limit", Title: "Limit per buyer", Status: http.StatusConflict,
			Detail: fmt.Sprintf("A buyer may have %d units; %d are bought.", v.MaxPerBuyer, result.AlreadySold),
			Extra:  map[string]any{"maxPerBuyer": v.MaxPerBuyer, "bought": result.AlreadySold}}
	case inventory.OutcomeNotOpen:
		return &Problem{Slug: "not-open", Title: "Not open yet", Status: http.StatusForbidden, RetryAfter: max(v.StartsAt.Sub(earliest), time.Second),
			Extra: map[string]any{"opensAt": v.StartsAt, "now": earliest}}
	case inventory.OutcomeSuspended:
		return &Problem{Slug: "suspended", Title: "The sale is paused", Status: http.StatusForbidden, RetryAfter: 5 * time.Second,
			Detail: "Reservations made before can still be paid."}
	case inventory.OutcomeKeyReused:
		return &Problem{Slug: "key-reused", Title: "The idempotency key was used for another request", Status: http.StatusUnprocessableEntity,
			Detail: "A key stands for one request with one body. Use a new one for a new request."}
	case inventory.OutcomeClosed:
		return &Problem{Slug: "closed", Title: "The sale is over", Status: http.StatusGone}
	}
	return problemUnavailable
}

// readyRefusals are the answers that memory may give by a view, ready to be sent.
type readyRefusals struct {
	view *admission.View
	by   map[inventory.Outcome]*readyAnswer
}

// prepare makes the refusals of a view that are the same for any quantity; nil when not all buyers are known, of whom one
// might have a reservation.
func prepare(v *admission.View) *readyRefusals {
	if !v.AllBuyers {
		return nil
	}
	outcomes := []inventory.Outcome{inventory.OutcomeAllHeld, inventory.OutcomeClosed, inventory.OutcomeSuspended}
	if v.Available+v.Held == 0 {
		outcomes = append(outcomes, inventory.OutcomeSoldOut)
	}
	ready := &readyRefusals{view: v, by: make(map[inventory.Outcome]*readyAnswer, len(outcomes))}
	for _, o := range outcomes {
		ready.by[o] = refusal(v, inventory.Result{Outcome: o}, 1).ready()
	}
	return ready
}

// refuse gives the answer to a request for quantity units, if it is one of those.
func (r *readyRefusals) refuse(quantity int) *readyAnswer {
	if r == nil {
		return nil
	}
	return r.by[r.view.Judge(time.Now(), quantity)]
}
