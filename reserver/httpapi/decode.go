package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/admission"
	"flashsale.dev/operator/reserver/inventory"
)

const maxBody = 64 << 10 // bytes

// decode reads a JSON object into v, whose fields are raw values that the caller checks. An empty body is an empty object.
func decode(w http.ResponseWriter, r *http.Request, v any) *Problem {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return problemTooLarge
	case err != nil:
		return problemInvalid("The body could not be read.")
	case len(bytes.TrimSpace(body)) == 0:
		return nil
	}
	if bytes.TrimSpace(body)[0] != '{' { // null would pass for an empty object
		return problemInvalid("The body is not a JSON object.")
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return problemInvalid(fmt.Sprintf("The body is not the JSON object expected: %v.", err))
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return problemInvalid("The body goes on after its JSON object.")
	}
	return nil
}

// decodeQuantity reads the body of POST /v1/reservations. A missing quantity, or body, means 1.
func decodeQuantity(w http.ResponseWriter, r *http.Request) (int, *Problem) {
	if r.Body == http.NoBody {
		return 1, nil
	}
	if n := r.ContentLength; n > 0 && n <= usualBody {
		// What nearly every page sends is read without the cost of a JSON decoder, which gets whatever else there is.
		text := make([]byte, n)
		if _, err := io.ReadFull(r.Body, text); err != nil {
			return 0, problemInvalid("The body could not be read.")
		}
		if n, ok := usualQuantity(text); ok {
			return n, nil
		}
		r.Body = io.NopCloser(bytes.NewReader(text))
	}
	var body struct {
		Quantity json.RawMessage `json:"quantity"`
	}
	if p := decode(w, r, &body); p != nil {
		return 0, p
	}
	if body.Quantity == nil {
		return 1, nil
	}
	n, err := strconv.ParseUint(string(body.Quantity), 10, 64)
	if err != nil || n < 1 || n > inventory.MaxQuantity {
		return 0, problemInvalid(fmt.Sprintf("quantity must be a whole number from 1 to %d.", inventory.MaxQuantity))
	}
	return int(n), nil
}

// usualBody is the length of the longest usual body.
const usualBody = int64(len(`{"quantity": 1000}`))

// usualQuantity reads {"quantity":1} and the like.
func usualQuantity(text []byte) (n int, ok bool) {
	digits, found := bytes.CutPrefix(text, []byte(`{"quantity":`))
	digits, closed := bytes.CutSuffix(digits, []byte(`}`))
	digits = bytes.TrimPrefix(digits, []byte(` `))
	if !found || !closed || len(digits) == 0 || len(digits) > 3 || digits[0] == '0' {
		return 0, false
	}
	for _, d := range digits {
		if d < '0' || d > '9' {
			return 0, false
		}
		n = 10*n + int(d-'0')
	}
	return n, true
}

// confirmBody is the body of POST /v1/reservations/{id}/confirm.
type confirmBody struct {
	PaymentID string  `json:"paymentId"`
	PaidAt    *string `json:"paidAt"`
}

func (b *confirmBody) check() (paidAt time.Time, p *Problem) {
	if !admission.ValidID(b.PaymentID) {
		return paidAt, problemInvalid(fmt.Sprintf("paymentId must be 1 to %d bytes of printable ASCII.", inventory.MaxIDLength))
	}
	if b.PaidAt != nil {
		t, err := time.Parse(time.RFC3339, *b.PaidAt)
		if err != nil || t.UTC().Year() < 2000 || t.UTC().Year() > 9999 {
			return paidAt, problemInvalid("paidAt must be an RFC 3339 time with an offset.")
		}
		paidAt = t
	}
	return paidAt, nil
}

// refundBody is the body of POST /v1/reservations/{id}/refund. When restock is missing, the units go back on sale.
type refundBody struct {
	Restock bool `json:"restock"`
}

// idempotencyKey gives the key that the client sent, or "" when it sent none.
func idempotencyKey(r *http.Request) (string, *Problem) {
	values := r.Header.Values("Idempotency-Key")
	if len(values) == 0 {
		return "", nil
	}
	if len(values) > 1 || !admission.ValidID(values[0]) {
		return "", problemInvalid(fmt.Sprintf("Idempotency-Key must be sent once, and be 1 to %d bytes of printable ASCII without spaces.", inventory.MaxIDLength))
	}
	return values[0], nil
}

// reservationID reads the id in the path. Anything that is not one is unknown.
func reservationID(r *http.Request) (uuid.UUID, *Problem) {
	text := r.PathValue("id")
	u, err := uuid.Parse(text)
	if err != nil || u.String() != text {
		return uuid.Nil, problemUnknown
	}
	return u, nil
}
